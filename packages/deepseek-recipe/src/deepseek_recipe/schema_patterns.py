"""Owns which patterns count as regular expressions in a schema.

The dialect has look-around, inline flags, Unicode classes and named groups, but no back-references. Nothing is matched
here.
"""

import re
import unicodedata
from typing import Final

_ESCAPES: Final = frozenset("dDwWsSbBAzZnrtfvaeGKhHRXO") | frozenset("\\.+*?()|[]{}^$#&-~/<>!\"%',:;=@`_ ")
_CLASS_ESCAPES: Final = frozenset("dDwWsSnrtfvaebhH") | frozenset("\\.+*?()|[]{}^$#&-~/<>!\"%',:;=@`_ ")
_SET_ESCAPES: Final = frozenset("dDwWsSpPhH")
_COUNT: Final = re.compile(r"\{ *([0-9]*) *(?:(,) *([0-9]*) *)?\}")
_GROUP: Final = re.compile(r"\?(?::|=|!|<=|<!|>|P?<([A-Za-z_][A-Za-z0-9_.\[\]]*)>|([imsxuUR]*(?:-[imsxuUR]+)?)(:|\)))")
_PROPERTY: Final = re.compile(r"\{\^?([^{}]*)\}|([A-Z])")
_BRACED_HEX: Final = re.compile(r"\{([0-9a-fA-F]{1,8})\}")
_HEX: Final = re.compile(r"[0-9a-fA-F]+")
_POSIX: Final = re.compile(r"\[:\^?([a-z]+):\]")
_POSIX_NAMES_TEXT: Final = """
alnum alpha ascii blank cntrl digit graph lower print punct space upper word xdigit
"""
_POSIX_NAMES: Final = frozenset(_POSIX_NAMES_TEXT.split())
_CATEGORIES_TEXT: Final = """
c cc cf cn co cs l lc ll lm lo lt lu m mc me mn n nd nl no p pc pd pe pf pi po ps s sc sk sm so z zl zp zs other
control format unassigned privateuse surrogate letter casedletter lowercaseletter modifierletter otherletter
titlecaseletter uppercaseletter mark spacingmark enclosingmark nonspacingmark number decimalnumber letternumber
othernumber punctuation connectorpunctuation dashpunctuation closepunctuation finalpunctuation
initialpunctuation otherpunctuation openpunctuation symbol currencysymbol modifiersymbol mathsymbol othersymbol
separator lineseparator paragraphseparator spaceseparator any ascii assigned
"""
_CATEGORIES: Final = frozenset(_CATEGORIES_TEXT.split())
_BINARY_TEXT: Final = """
alphabetic alpha asciihexdigit ahex bidicontrol bidic casedignorable ci cased changeswhencasefolded cwcf
changeswhencasemapped cwcm changeswhenlowercased cwl changeswhentitlecased cwt changeswhenuppercased cwu dash
defaultignorablecodepoint di deprecated dep diacritic dia emoji emojicomponent ecomp emojimodifier emod
emojimodifierbase ebase emojipresentation epres extendedpictographic extpict extender ext graphemebase grbase
graphemeextend grext hexdigit hex idcontinue idc idstart ids ideographic ideo joincontrol joinc
logicalorderexception loe lowercase lower math noncharactercodepoint nchar patternsyntax patsyn
patternwhitespace patws quotationmark qmark radical regionalindicator ri sentenceterminal sterm softdotted sd
terminalpunctuation term unifiedideograph uideo uppercase upper variationselector vs whitespace wspace space
xidcontinue xidc xidstart xids
"""
_BINARY: Final = frozenset(_BINARY_TEXT.split())
_SHORT_SCRIPTS_TEXT: Final = """
arab armn beng bopo cyrl deva ethi geor grek gujr guru hang hani hebr hira jpan kana khmr knda laoo latn mlym
mong mymr orya sinh taml telu thaa thai tibt zyyy zinh common inherited han
"""
_SHORT_SCRIPTS: Final = frozenset(_SHORT_SCRIPTS_TEXT.split())


def is_pattern(text: str) -> bool:
    """Whether `text` is a regular expression of the dialect."""
    try:
        _Pattern(text).check()
    except _BadPatternError:
        return False
    return True


class _BadPatternError(ValueError):
    pass


class _Pattern:
    """Walks over a pattern once; raises _BadPatternError at the first thing that is not of the dialect."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.index = 0
        self.names: set[str] = set()

    def ahead(self) -> str:
        return self.text[self.index : self.index + 1]

    def check(self) -> None:
        depth = 0
        repeatable = False
        while self.index < len(self.text):
            character = self.ahead()
            if character in "*+?{":
                if not repeatable:
                    raise _BadPatternError("nothing to repeat")
                self.repeat(character)
                repeatable = False
                continue
            self.index += 1
            repeatable = True
            if character == "\\":
                self.escape(_ESCAPES)
            elif character == "[":
                self.char_class()
            elif character == "(":
                opened = self.group()
                depth += opened
                repeatable = False
            elif character == ")":
                depth -= 1
                if depth < 0:
                    raise _BadPatternError("unopened group")
            elif character == "|":
                repeatable = False
        if depth:
            raise _BadPatternError("unclosed group")

    def repeat(self, character: str) -> None:
        """Read one quantifier with its `?` or `+`."""
        if character == "{":
            match = _COUNT.match(self.text, self.index)
            if not match or not (match[1] or match[3]):
                raise _BadPatternError("bad count")
            low, high = int(match[1] or 0), int(match[3]) if match[3] else None
            if (high is not None and low > high) or max(low, high or 0) > 1 << 31:
                raise _BadPatternError("bad range of counts")
            self.index = match.end()
        else:
            self.index += 1
        if self.ahead() in ("?", "+"):
            self.index += 1

    def group(self) -> int:
        """Read the start of a group; return 1 if it has to be closed."""
        if self.ahead() != "?":
            return 1
        if self.text.startswith("?#", self.index):
            end = self.text.find(")", self.index)
            if end < 0:
                raise _BadPatternError("unclosed comment")
            self.index = end + 1
            return 0
        match = _GROUP.match(self.text, self.index)
        if not match or match[0] == "?)":
            raise _BadPatternError("unknown kind of group")
        if match[1]:
            if match[1] in self.names:
                raise _BadPatternError("repeated group name")
            self.names.add(match[1])
        self.index = match.end()
        return 0 if match[3] == ")" else 1

    def escape(self, allowed: frozenset[str]) -> int | None:
        """Read what follows a backslash; return the code point it stands for, or None for a set."""
        character = self.ahead()
        self.index += 1
        if character == "":
            raise _BadPatternError("lone backslash")
        if character in "pP":
            self.property()
            return None
        if character in "xuU":
            return self.code_point({"x": 2, "u": 4, "U": 8}[character])
        if character not in allowed:
            raise _BadPatternError("unknown escape")
        if character in _SET_ESCAPES:
            return None
        return ord({"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}.get(character, character))

    def code_point(self, digits: int) -> int:
        match = _BRACED_HEX.match(self.text, self.index)
        if match:
            self.index = match.end()
            value = int(match[1], 16)
        else:
            plain = self.text[self.index : self.index + digits]
            if len(plain) < digits or not _HEX.fullmatch(plain):
                raise _BadPatternError("bad code point")
            self.index += digits
            value = int(plain, 16)
        if value > 0x10FFFF or 0xD800 <= value <= 0xDFFF:
            raise _BadPatternError("no such code point")
        return value

    def property(self) -> None:
        match = _PROPERTY.match(self.text, self.index)
        if not match or not _is_property(match[1] if match[2] is None else match[2]):
            raise _BadPatternError("unknown property")
        self.index = match.end()

    def char_class(self) -> None:
        """Read a class whose bracket has been read."""
        if self.ahead() == "^":
            self.index += 1
        first = True
        low: int | None = None
        while True:
            character = self.ahead()
            if character == "":
                raise _BadPatternError("unclosed class")
            if character == "]" and not first:
                self.index += 1
                return
            first = False
            if character == "-" and low is not None and self.text[self.index + 1 : self.index + 2] not in ("]", "-"):
                self.index += 1
                high = self.class_item()
                if high is None or low > high:
                    raise _BadPatternError("bad range")
                low = None
            else:
                low = self.class_item()

    def class_item(self) -> int | None:
        """Read one item of a class; return its code point, or None for a set."""
        character = self.ahead()
        if character == "":
            raise _BadPatternError("unclosed class")
        posix = _POSIX.match(self.text, self.index)
        if posix and posix[1] in _POSIX_NAMES:
            self.index = posix.end()
            return None
        self.index += 1
        if character == "[":
            self.char_class()
            return None
        return self.escape(_CLASS_ESCAPES) if character == "\\" else ord(character)


def _is_property(name: str) -> bool:
    kind, separator, value = name.replace("!=", "=").replace(":", "=").partition("=")
    if separator:
        kind = _loose(kind)
        if kind in ("sc", "script", "scx", "scriptextensions"):
            return _is_script(value)
        return kind in ("gc", "generalcategory") and _loose(value) in _CATEGORIES
    return _loose(name) in _CATEGORIES or _loose(name) in _BINARY or _is_script(name)


def _loose(name: str) -> str:
    return re.sub(r"[ _-]", "", name).lower()


def _is_script(name: str) -> bool:
    """Whether a script has this name: some character's Unicode name begins with it."""
    loose = _loose(name)
    if loose in _SHORT_SCRIPTS:
        return True
    words = re.sub(r"[_-]", " ", name).upper()
    for suffix in (" LETTER A", " LETTER KA", " SYLLABLE A", " CAPITAL LETTER A", " LETTER ALAP", " SIGN A"):
        try:
            unicodedata.lookup(words + suffix)
        except KeyError:
            continue
        return True
    return False
