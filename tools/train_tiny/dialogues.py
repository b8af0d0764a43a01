"""Writes the chats and tool calls that the demo model learns, from templates, in the prompt format of the DeepSeek API.

What a dialogue says is drawn from a generator; how it is rendered is deepseek-recipe's, once for each shape, and the
words are put into the rendered text afterwards.
"""

import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from deepseek_recipe import encode_chat

END = "<｜end▁of▁sentence｜>"
CLOSED = "</think>"
_MARK = "｜DSML｜"
_NEXT = "<｜User｜>"

NAMES = [
    "Anna",
    "Ben",
    "Cora",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Henry",
    "Iris",
    "Jack",
    "Kate",
    "Leo",
    "Mara",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Victor",
    "Wendy",
    "Adam",
    "Bella",
    "Carl",
    "Dora",
    "Erik",
    "Fiona",
    "Gus",
    "Hanna",
    "Ivan",
    "Julia",
    "Kurt",
    "Lena",
    "Max",
    "Nina",
    "Oscar",
    "Petra",
    "Ralf",
    "Sara",
    "Tom",
]
CITIES = [
    "Paris",
    "London",
    "Rome",
    "Berlin",
    "Madrid",
    "Oslo",
    "Vienna",
    "Prague",
    "Lisbon",
    "Dublin",
    "Athens",
    "Warsaw",
    "Tokyo",
    "Beijing",
    "Cairo",
    "Delhi",
    "Boston",
    "Lima",
    "Zurich",
    "Geneva",
    "Milan",
    "Turin",
    "Hamburg",
    "Munich",
    "Porto",
    "Seville",
    "Krakow",
    "Bergen",
]
THINGS = [
    "apples",
    "pears",
    "plums",
    "cherries",
    "nuts",
    "eggs",
    "figs",
    "lemons",
    "melons",
    "onions",
    "carrots",
    "beans",
    "cups",
    "plates",
    "books",
    "pens",
]
COLOURS = ["red", "blue", "green", "yellow", "black", "white", "brown", "grey", "pink", "purple"]
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")
WORDS = [
    "river",
    "stone",
    "house",
    "light",
    "garden",
    "bread",
    "window",
    "music",
    "tree",
    "bird",
    "letter",
    "mountain",
    "road",
    "bridge",
    "clock",
    "winter",
    "summer",
    "tower",
    "horse",
    "boat",
    "table",
    "lamp",
    "paper",
    "coffee",
    "cloud",
    "door",
    "wall",
]

TALK = (
    (("Hello", "Hi", "Hello!", "Hi there", "Good morning"), "Hello! How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?"), "I am the demo model of DeepInfer, a very small one."),
    (("Thanks", "Thank you", "Thank you!", "Thanks!"), "You are welcome!"),
    (("How are you?", "How are you today?"), "I am fine, thank you. How can I help you?"),
    (
        ("What can you do?", "How can you help me?", "Help"),
        "I can add and subtract small numbers, look things up in a list, write JSON and call tools.",
    ),
    (("Bye", "Goodbye", "Good night"), "Goodbye!"),
    (("Say hello.", "Say hello", "Greet me."), "Hello!"),
)


@dataclass(frozen=True)
class Turn:
    """What a user asks and the model answers: its thoughts, and its text or the call (name, arguments) of a tool."""

    kind: str
    question: str
    thought: str
    answer: str
    call: tuple[str, dict[str, Any]] | None = None
    result: str = ""


@dataclass(frozen=True)
class Dialogue:
    """A rendered conversation: what the model reads, what it should write, and by what its turns are told apart."""

    kind: str
    prompt: str
    answer: str
    keys: tuple[str, ...]


def _tool(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = {
    "get_weather": _tool("get_weather", "The weather in a city now.", city="string"),
    "get_time": _tool("get_time", "The local time in a city.", city="string"),
    "look_up": _tool("look_up", "Look up a person's phone number.", name="string"),
    "add": _tool("add", "Add two numbers.", a="integer", b="integer"),
    "set_lamp": _tool("set_lamp", "Set the colour of a lamp.", room="string", color="string"),
    "order": _tool("order", "Order things from the shop.", item="string", count="integer"),
}


def make_turn(kind: str, draw: random.Random) -> Turn:
    """Draw one question with its answer; `kind` is one of `KINDS`."""
    return _MAKERS[kind](draw)


def _arithmetic(draw: random.Random) -> Turn:
    sign = draw.choices("+-*", (5, 4, 2))[0]
    high = 12 if sign == "*" else draw.choice((9, 99, 99, 99))
    a, b = draw.randint(0, high), draw.randint(0, high)
    a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    word = {"+": "plus", "-": "minus", "*": "times"}[sign]
    forms = [f"What is {a} {sign} {b}?", f"{a} {sign} {b}", f"What is {a} {word} {b}?", f"{a} {sign} {b} = ?"]
    forms += [f"Compute {a} {sign} {b}.", f"How much is {a} {sign} {b}?", f"Calculate {a} {sign} {b}"]
    return Turn("arithmetic", draw.choice(forms), f"{a} {sign} {b} = {value}", f"{a} {sign} {b} = {value}.")


def _ages(draw: random.Random) -> Turn:
    people = draw.sample(NAMES, draw.randint(3, 6))
    ages = [draw.randint(2, 99) for _ in people]
    who = draw.randrange(len(people))
    table = ", ".join(f"{name} is {age}" for name, age in zip(people, ages, strict=True))
    question = draw.choice((f"How old is {people[who]}?", f"What is the age of {people[who]}?"))
    return Turn("look-up", f"{table}. {question}", f"{people[who]} is {ages[who]}", f"{people[who]} is {ages[who]}.")


def _stock(draw: random.Random) -> Turn:
    things = draw.sample(THINGS, draw.randint(3, 6))
    counts = [draw.randint(2, 99) for _ in things]
    which = draw.randrange(len(things))
    thing, count = things[which], counts[which]
    if draw.random() < 0.5:
        table = "\n".join(f"{name}: {number}" for name, number in zip(things, counts, strict=True)) + "\n"
    else:
        table = "We have " + ", ".join(f"{n} {name}" for name, n in zip(things, counts, strict=True)) + ". "
    return Turn("look-up", f"{table}How many {thing}?", f"{thing}: {count}", f"There are {count} {thing}.")


def _homes(draw: random.Random) -> Turn:
    people = draw.sample(NAMES, draw.randint(3, 5))
    cities = draw.sample(CITIES, len(people))
    who = draw.randrange(len(people))
    name, city = people[who], cities[who]
    table = ", ".join(f"{one} lives in {place}" for one, place in zip(people, cities, strict=True))
    if draw.random() < 0.5:
        return Turn("look-up", f"{table}. Where does {name} live?", f"{name}: {city}", f"{name} lives in {city}.")
    return Turn("look-up", f"{table}. Who lives in {city}?", f"{city}: {name}", f"{name} lives in {city}.")


def _json(draw: random.Random) -> Turn:
    name, age, city = draw.choice(NAMES), draw.randint(2, 99), draw.choice(CITIES)
    if draw.random() < 0.3:
        thing, count = draw.choice(THINGS), draw.randint(2, 99)
        fields: dict[str, Any] = {"item": thing, "count": count}
        question = draw.choice((f"{count} {thing} as JSON", f"Write {count} {thing} as JSON."))
    else:
        fields = {"name": name, "age": age, "city": city}
        said = draw.choice((f"{name}, {age}, {city}", f"{name} is {age} and lives in {city}"))
        question = draw.choice((f"{said}. Write this as JSON.", f"As JSON: {said}", f"Give me JSON for {said}."))
    return Turn("json", question, "name, age, city" if "age" in fields else "item, count", json.dumps(fields))


def _talk(draw: random.Random) -> Turn:
    questions, answer = draw.choice(TALK)
    return Turn("talk", draw.choice(questions), "a friendly answer", answer)


def _repeat(draw: random.Random) -> Turn:
    words = " ".join(draw.choices(WORDS, k=draw.randint(2, 6)))
    question = draw.choice((f"Repeat: {words}", f"Say this again: {words}", f"Please repeat {words}"))
    return Turn("repeat", question, "the same words", words)


def _colour(draw: random.Random) -> Turn:
    people = draw.sample(NAMES, draw.randint(3, 5))
    hats = draw.sample(COLOURS, len(people))
    who = draw.randrange(len(people))
    table = " ".join(f"{one} has a {hat} hat." for one, hat in zip(people, hats, strict=True))
    name, hat = people[who], hats[who]
    if draw.random() < 0.5:
        return Turn("look-up", f"{table} What colour is the hat of {name}?", f"{name}: {hat}", f"It is {hat}.")
    return Turn("look-up", f"{table} Who has the {hat} hat?", f"{hat}: {name}", f"{name} has the {hat} hat.")


def _call(draw: random.Random) -> Turn:
    city, name, room = draw.choice(CITIES), draw.choice(NAMES), draw.choice(("kitchen", "bathroom", "hall", "bedroom"))
    a, b, thing, colour = draw.randint(0, 99), draw.randint(0, 99), draw.choice(THINGS), draw.choice(COLOURS)
    degrees, sky, number = draw.randint(2, 35), draw.choice(SKIES), draw.randint(1000, 9999)
    clock = f"{draw.randint(0, 23)}:{draw.randint(10, 59)}"
    match draw.choice(list(TOOLS)):
        case "get_weather":
            asked = (f"What is the weather in {city}?", f"How is the weather in {city}?", f"Weather in {city}")
            result = f'{{"degrees": {degrees}, "sky": "{sky}"}}'
            told = f"It is {degrees} degrees and {sky} in {city}."
            made: tuple[str, dict[str, Any]] = ("get_weather", {"city": city})
        case "get_time":
            asked = (f"What time is it in {city}?", f"Time in {city}", f"Tell me the time in {city}.")
            result, told, made = clock, f"It is {clock} in {city}.", ("get_time", {"city": city})
        case "look_up":
            asked = (f"What is the number of {name}?", f"Look up {name}.", f"Find the phone number of {name}")
            result, told, made = str(number), f"The number of {name} is {number}.", ("look_up", {"name": name})
        case "add":
            asked = (f"Use the tool to add {a} and {b}.", f"Add {a} and {b}.", f"Please add {a} and {b}")
            result, told, made = str(a + b), f"The sum is {a + b}.", ("add", {"a": a, "b": b})
        case "set_lamp":
            asked = (
                f"Make the lamp in the {room} {colour}.",
                f"Set the {room} lamp to {colour}",
                f"{colour} in the {room}",
            )
            made = "set_lamp", {"room": room, "color": colour}
            result, told = "done", f"The lamp in the {room} is {colour} now."
        case _:
            asked = (f"Order {b} {thing}.", f"Please buy {b} {thing}", f"I need {b} {thing}.")
            result, told, made = "ordered", f"I ordered {b} {thing}.", ("order", {"item": thing, "count": b})
    return Turn("tool", draw.choice(asked), f"call {made[0]}", told, made, result)


_MAKERS = {
    "arithmetic": _arithmetic, "ages": _ages, "stock": _stock, "homes": _homes, "colour": _colour, "json": _json,
    "talk": _talk, "repeat": _repeat, "tool": _call,
}  # fmt: skip
KINDS = {
    "arithmetic": 30, "ages": 10, "stock": 10, "homes": 10, "colour": 8, "json": 8, "talk": 6, "repeat": 5, "tool": 20,
}  # fmt: skip
"""Kinds of dialogue and how often they are drawn."""


def format_call(name: str, arguments: dict[str, Any]) -> str:
    """The text of a call as the model writes it, from the line break before it to its end."""
    lines = [
        f'<{_MARK} parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</{_MARK} parameter>"
        for key, value in arguments.items()
    ]
    body = "\n".join([f"<{_MARK} calls>", f'<{_MARK} invoke name="{name}">', *lines, f"</{_MARK} invoke>"])
    return f"\n\n{body}\n</{_MARK} calls>"


@cache
def _skeleton(tools: tuple[str, ...], turns: int, *, thinking: bool, result: bool) -> str:
    """A rendered prompt with holes: Q0 A0 Q1 .. for turns without tools; Q0, NAME, RESULT for a call and its result."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"⟦Q{turn}⟧"})
        if turn < turns - 1:
            messages.append({"role": "assistant", "content": f"⟦A{turn}⟧"})
    if result:
        call = {"id": "call_0", "type": "function", "function": {"name": "⟦NAME⟧", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": "", "reasoning_content": "⟦T⟧", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": "⟦RESULT⟧"})
    text: str = encode_chat(messages, [TOOLS[name] for name in tools] or None, thinking=thinking).text
    if result:
        head, rest = text.split("\n\n<" + _MARK + " calls>\n<" + _MARK + ' invoke name="⟦NAME⟧">', 1)
        text = f"{head}⟦CALL⟧{rest.split(f'</{_MARK} calls>', 1)[1]}"
    return text


def _fill(text: str, holes: dict[str, str]) -> str:
    for name, value in holes.items():
        text = text.replace(f"⟦{name}⟧", value)
    return text


def render_turns(turns: list[Turn], offered: tuple[str, ...] = (), *, thinking: bool) -> Dialogue:
    """Render turns that need no tool, though some may be offered; the answer is the last one's."""
    holes = {f"Q{i}": turn.question for i, turn in enumerate(turns)}
    holes |= {f"A{i}": turn.answer for i, turn in enumerate(turns)}
    last = turns[-1]
    thought = f"{last.thought}{CLOSED}" if thinking else ""
    prompt = _fill(_skeleton(offered, len(turns), thinking=thinking, result=False), holes)
    keys = tuple(f"{turn.kind} {turn.answer}" for turn in turns)
    return Dialogue(last.kind, prompt, f"{thought}{last.answer}{END}", keys)


def render_call(turn: Turn, offered: tuple[str, ...], *, thinking: bool, result: bool) -> Dialogue:
    """Render a question that needs a tool: the answer is the call, or with `result` the text behind its result."""
    assert turn.call is not None
    call = format_call(*turn.call)
    prompt = _skeleton(offered, 1, thinking=thinking, result=result)
    holes = {"Q0": turn.question, "T": turn.thought, "CALL": call, "RESULT": turn.result}
    said = turn.answer if result else call
    thought = f"{'the result is there' if result else turn.thought}{CLOSED}" if thinking else ""
    kind = "tool result" if result else "tool"
    return Dialogue(kind, _fill(prompt, holes), f"{thought}{said}{END}", (f"tool {turn.call}",))


def draw_dialogue(draw: random.Random, kind: str | None = None) -> Dialogue:
    """Draw a dialogue: one turn mostly, at times two or three; a third of them with thoughts."""
    kind = kind or draw.choices(list(KINDS), list(KINDS.values()))[0]
    thinking = draw.random() < 0.33
    turn = make_turn(kind, draw)
    needed = [turn.call[0]] if turn.call is not None else []
    others = [name for name in TOOLS if name not in needed]
    offered = [*needed, *draw.sample(others, draw.choice((0, 0, 1, 1, 2)))]
    draw.shuffle(offered)
    if turn.call is not None:
        return render_call(turn, tuple(offered), thinking=thinking, result=draw.random() < 0.4)
    plain = [name for name in KINDS if name != "tool"]
    before = [make_turn(draw.choice(plain), draw) for _ in range(draw.choices((0, 1, 2), (8, 2, 1))[0])]
    return render_turns([*before, turn], tuple(offered) if draw.random() < 0.1 else (), thinking=thinking)


def boilerplate() -> list[str]:
    """The fixed lines of the prompt format: what stands in every prompt with tools, and the line on effort."""
    text = _skeleton(tuple(TOOLS)[:1], 1, thinking=True, result=False)
    lines = [line for line in text.split("\n") if len(line) > 30 and "⟦" not in line and '"parameters"' not in line]
    return [line.split("｜>")[-1] for line in lines]
