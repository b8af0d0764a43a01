"""The import-linter contract type `room`: modules that may import only what their room's list allows.

The lists themselves, one a room, stand in the root `pyproject.toml`.
"""

import sys
from typing import override

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class RoomContract(Contract):
    """Every import of a room, also inside functions, goes to the room, the standard library, or a listed package.

    Fields: `room`, a module with all below it; `outside`, modules below it that are rooms of their own;
    `may_import`, modules and third-party packages, each with all below it. A `room` that does not exist is an error,
    so that a contract cannot pass because of a misspelt name.
    """

    type_name = "room"

    room = fields.StringField()
    outside = fields.SetField(subfield=fields.StringField(), required=False, default=set())
    may_import = fields.SetField(subfield=fields.StringField(), required=False, default=set())

    @override
    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Return the direct imports that leave the room by a door it does not have."""
        room = str(self.room)
        if room not in graph.modules:
            raise ValueError(f"the contract {self.name!r} names the module {room}, which does not exist")
        outside = set(self.outside)  # type: ignore[call-overload]
        allowed = set(self.may_import)  # type: ignore[call-overload]
        violations = []
        for importer in sorted(graph.modules):
            if not _is_in(importer, {room}) or _is_in(importer, outside):
                continue
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                if _is_in(imported, allowed) or imported.partition(".")[0] in sys.stdlib_module_names:
                    continue
                if not _is_in(imported, {room}) or _is_in(imported, outside):
                    details = graph.get_import_details(importer=importer, imported=imported)
                    violations.append((importer, imported, sorted({detail["line_number"] for detail in details})))
        return ContractCheck(kept=not violations, metadata={"violations": violations})

    @override
    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each import that is not allowed, with its lines."""
        for importer, imported, lines in check.metadata["violations"]:
            where = ", ".join(f"l. {line}" for line in lines)
            output.print_error(f"{importer} imports {imported} ({where})", bold=True)
        output.new_line()
        output.print(f"{self.room} may import: {', '.join(sorted(self.may_import)) or 'the standard library only'}")  # type: ignore[call-overload]


def _is_in(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
