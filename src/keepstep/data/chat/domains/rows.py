"""Conversations over the functions of the domains: one call, one of several functions, several calls, calls that need
an earlier result, several turns, missing values, and requests that no function serves.

Row i is a pure function of (seed, split, i). The splits share no action, so `test` asks for functions that `train`
never shows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from keepstep.data.chat.domains.functions import Function, argument, draw_action, show_function, siblings
from keepstep.data.chat.domains.parameters import NUMBER_WORDS, Parameter, Said, drawn_value, filled, grammar, phrase
from keepstep.data.chat.generate import Category, GeneratedRow, Split
from keepstep.data.chat.rows import call, canonical

_KINDS = ("simple", "multiple", "parallel", "parallel_multiple", "irrelevance", "missing", "turns", "dependent")
_WEIGHTS = (20, 22, 16, 14, 20, 3, 5, 3)
_CATEGORIES: dict[str, Category] = {
    "multiple": "multiple", "parallel": "parallel", "parallel_multiple": "parallel", "irrelevance": "irrelevance",
}  # fmt: skip
_MENTIONED_SHARES, _SELDOM_SHARE = (0.0, 0.4, 0.5, 0.7), 0.08
"""Optional parameters that a request gives a value, and those that few give one."""
_PREAMBLE_SHARE, _CLOSER_SHARE, _NAMED_SHARE = 0.2, 0.15, 0.04
"""Requests with words before and after them, and those that name a function."""
_CARELESS_SHARE, _SYSTEM_SHARE = 0.1, 0.08
"""Requests without a capital and a mark at the end, and conversations with a system message."""
_SIBLING_SHARE = 0.5
"""Of the requests with functions to choose from, those with others of the same domain."""
_SHARED_SHARE = 0.4
"""Requests for several functions that speak of the same thing."""
_ORDINALS = ("First, ", "Second, ", "Third, ", "Lastly, ")
_COUNTED = ("first", "second", "third", "fourth")
_JOINTS = (" Also, ", " Then ", " After that, ", " And ", " Next, ", " Finally, ")
_UNLISTED = {"flag", "object", "list", "items", "matrix", "point"}
"""Kinds whose values cannot be distinguished in an enumeration."""
Given = list[tuple[Parameter, Said]]


def generate_row(index: int, seed: int, split: Split) -> GeneratedRow:
    """One row."""
    draw = Random(f"domains {seed} {split} {index}")
    kind = draw.choices(_KINDS, _WEIGHTS)[0]
    make = {"irrelevance": _irrelevant, "missing": _missing, "turns": _turns, "dependent": _dependent}.get(kind)
    if make:
        messages, shown = make(draw, split)
    else:
        most = 3 if kind.startswith("parallel") else 1
        count = 1 if kind in ("simple", "multiple") else draw.choice((2, 2, 3, most, 4 if kind == "parallel" else 3))
        different = draw.randint(2, min(3, count)) if kind == "parallel_multiple" else 1
        shown = _functions(different, draw, split)
        chosen = [*shown, *(draw.choice(shown) for _ in range(count - different))]
        messages = _exchange(chosen, draw)
        if kind in ("multiple", "parallel_multiple"):
            shown = _with_others(shown, draw.choice((1, 1, 2, 2, 3, 4, 6, 9)), draw, split)
    if draw.random() < _SYSTEM_SHARE:
        messages = [{"role": "system", "content": filled(draw.choice(grammar()["systems"]), draw)}, *messages]
    category = _CATEGORIES.get(kind, "simple")
    return GeneratedRow(canonical(messages, [function.tool for function in shown]), category)


def _functions(count: int, draw: Random, split: Split) -> list[Function]:
    """Functions with names of their own, for actions of their own."""
    while True:
        found = [show_function(draw_action(draw, split), draw) for _ in range(count)]
        if len({item.name for item in found}) == len({item.action.name for item in found}) == count:
            return found


def _with_others(needed: Sequence[Function], count: int, draw: Random, split: Split) -> list[Function]:
    """The needed functions among others, in any order."""
    near = siblings(needed[0].action, draw, split)[:count] if draw.random() < _SIBLING_SHARE else []
    others = [*(show_function(action, draw) for action in near), *_functions(count - len(near), draw, split)]
    # By action and by name, the needed ones last: of two alike they stay.
    found = {item.action.name: item for item in (*others, *needed)}
    shown = list({item.name: item for item in found.values()}.values())
    return draw.sample(shown, len(shown))


def _given(function: Function, draw: Random, without: Sequence[Parameter] = ()) -> Given:
    """Values for the required and some of the optional parameters."""
    share = draw.choice(_MENTIONED_SHARES)
    chosen = [
        item
        for item in function.parameters
        if item.slot.required or draw.random() < (_SELDOM_SHARE if item.slot.seldom else share)
    ]
    return [(item, drawn_value(item, draw)) for item in chosen if item not in without]


def _arguments(given: Given) -> dict[str, Any]:
    return {parameter.name: argument(parameter, said.value) for parameter, said in given}


def _request(function: Function, given: Given, draw: Random) -> str:
    """A sentence that asks for one call."""
    style = draw.random()
    ask = draw.choice(function.action.asks)
    if style < 0.12 and given:
        listed = _listed([_pair(*each, draw) for each in given])
        return _sentence(f"{ask.rstrip('?')} with {listed}", ask, draw)
    parts = [phrase(parameter, said, draw) for parameter, said in given]
    if draw.random() < 0.3:
        draw.shuffle(parts)
    if len(parts) > 2 and draw.random() < 0.4:
        told = f"{', '.join(parts[:-1])} and {parts[-1]}".replace("and and ", "and ")
    else:
        told = " ".join(parts)
    return _sentence(f"{ask.rstrip('?')} {told}".strip(), ask, draw)


def _sentence(text: str, ask: str, draw: Random) -> str:
    if ask.endswith("?"):
        return text[0].upper() + text[1:] + "?"
    opener = "" if text.startswith("I ") else draw.choice(grammar()["openers"])
    whole = opener + text
    ending = "?" if opener.startswith(("Can", "Could")) else draw.choice((".", ".", ""))
    return whole[0].upper() + whole[1:] + ending


def _asked(functions: Sequence[Function], all_given: Sequence[Given], draw: Random) -> str:
    """One text for several calls."""
    texts = [_request(function, given, draw) for function, given in zip(functions, all_given, strict=True)]
    if 1 < len(texts) <= len(_ORDINALS) and draw.random() < 0.2:
        parts = [ordinal + _continued(text) for ordinal, text in zip(_ORDINALS, texts, strict=False)]
        return " ".join(map(_ended, parts))
    whole = texts[0]
    for text in texts[1:]:
        if draw.random() < 0.6:
            whole = f"{_ended(whole)}{draw.choice(_JOINTS)}{_continued(text)}"
        else:
            whole = f"{_ended(whole)} {text}"
    return whole


def _continued(sentence: str) -> str:
    """A sentence behind other words."""
    return sentence if sentence.startswith(("I ", "I'")) else sentence[0].lower() + sentence[1:]


def _calls(functions: Sequence[Function], all_given: Sequence[Given]) -> dict[str, Any]:
    made = [call(function.name, _arguments(given)) for function, given in zip(functions, all_given, strict=True)]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _exchange(functions: Sequence[Function], draw: Random) -> list[dict[str, Any]]:
    """A request and the calls that answer it."""
    text, all_given = "", list[Given]()
    if len(functions) > 1 and len({item.name for item in functions}) == 1:
        make = draw.choices((_repeated, _changed, _enumerated, None), (36, 12, 36, 16))[0]
        if make:
            text, all_given = make(functions[0], len(functions), draw)
    if not all_given:
        # Nobody asks for the same call twice, and models learn to repeat themselves soon enough.
        all_given = [_given(function, draw) for function in functions]
        if len({item.name for item in functions}) == len(functions) and draw.random() < _SHARED_SHARE:
            all_given = _of_one_subject(all_given, draw)
        pairs = {
            json.dumps([item.name, _arguments(given)]): (item, given)
            for item, given in zip(functions, all_given, strict=True)
        }
        functions, all_given = [item for item, _ in pairs.values()], [given for _, given in pairs.values()]
        text = _asked(functions, all_given, draw)
    if draw.random() < _PREAMBLE_SHARE:
        text = f"{filled(draw.choice(grammar()['preambles']), draw)} {text}"
    if draw.random() < _CLOSER_SHARE:
        text = f"{_ended(text)} {filled(draw.choice(grammar()['closers']), draw)}"
    elif draw.random() < _NAMED_SHARE:
        text = f"{_ended(text)} {draw.choice(('Use', 'Please use'))} {' and '.join({f.name: 0 for f in functions})}."
    if draw.random() < _CARELESS_SHARE:
        text = text[0].lower() + text[1:].rstrip(".?")
    return [{"role": "user", "content": text}, _calls(functions[: len(all_given)], all_given)]


def _ended(text: str) -> str:
    """With a mark at its end."""
    return text if text.endswith((".", "?")) else f"{text}."


def _of_one_subject(all_given: Sequence[Given], draw: Random) -> list[Given]:
    """The calls with the same value where they have a parameter of the same list, which a request may not repeat."""
    first: dict[str, tuple[Parameter, Said]] = {}
    found = list[Given]()
    for given in all_given:
        found.append([])
        for item, said in given:
            earlier, known = first.setdefault(item.slot.kind + item.form, (item, said))
            # Numbers and choices are alike by chance only.
            if known is not said and item.slot.kind.isupper():
                alike = earlier.words == item.words and draw.random() < 0.4
                text = f"the same {item.words}" if alike else known.text
                said = Said(known.value, text)
            found[-1].append((item, said))
    return found


def _places(given: Given) -> list[int]:
    """Where a request can list several values."""
    return [place for place, (item, _) in enumerate(given) if item.slot.kind.split()[0] not in _UNLISTED]


def _different(item: Parameter, first: Said, count: int, draw: Random) -> list[Said]:
    """Values of one parameter, the first one included, no two of them alike: fewer where it has not so many."""
    drawn = [first, *(drawn_value(item, draw) for _ in range(4 * count))]
    return list({repr(said.value): said for said in reversed(drawn)}.values())[::-1][:count]


def _repeated(function: Function, count: int, draw: Random) -> tuple[str, list[Given]]:
    """Calls of one function that share all values but those of one or two parameters, which the request lists."""
    given = _given(function, draw)
    places = _places(given)
    if not places:
        return "", []
    listed = draw.sample(places, 2 if len(places) > 1 and draw.random() < 0.4 else 1)
    values = [_different(*given[place], count, draw) for place in listed]
    count = min(map(len, values))
    together, calls = list(given), [list(given) for _ in range(count)]
    joint = draw.choice((" and ", ", and ", " and then "))
    for place, said in zip(listed, values, strict=True):
        item, first = given[place]
        texts = [each.text for each in said[:count]]
        together[place] = (
            item,
            Said(first.value, f"{', '.join(texts[:-1])}{joint}{texts[-1]}" if count > 1 else texts[0]),
        )
        for number, each in enumerate(said[:count]):
            calls[number][place] = (item, each)
    text = _request(function, together, draw)
    if len(listed) > 1 and count > 1:
        text = f"{text.rstrip('.?')}{draw.choice((', respectively', ' respectively'))}{text[len(text.rstrip('.?')) :]}"
    return text, calls


def _changed(function: Function, count: int, draw: Random) -> tuple[str, list[Given]]:
    """Calls of one function, each of which differs from the first in one value."""
    given = _given(function, draw)
    places = _places(given)
    if not places:
        return "", []
    place = draw.choice(places)
    item = given[place][0]
    values = _different(*given[place], count, draw)
    again = draw.choice(("Then repeat it with {}", "Do the same with {}", "Once more with {}", "And again, with {}"))
    text = _request(function, given, draw)
    for said in values[1:]:
        text = f"{_ended(text)} {again.format(_pair(item, said, draw))}."
        again = draw.choice(("Also with {}", "Then with {}", "And with {}"))
    return text, [[*given[:place], (item, said), *given[place + 1 :]] for said in values]


def _enumerated(function: Function, count: int, draw: Random) -> tuple[str, list[Given]]:
    """Calls of one function whose values the request tells one after the other, and what they share once, before or
    after it asks."""
    given = _given(function, draw)
    if not given:
        return "", []
    varied = sorted(draw.sample(range(len(given)), draw.randint(1, len(given))))
    drawn = [[(given[place][0], drawn_value(given[place][0], draw)) for place in varied] for _ in range(2 * count)]
    cases = list({repr([said.value for _, said in case]): case for case in drawn}.values())[:count]
    texts = [_listed([_pair(*each, draw) for each in case]) for case in cases]
    form = draw.choice(
        ("The {} has {}.", "The {} one has {}.", "In the {} case, {}.", "The {} one: {}.", "For the {}, {}.", "", "")
    )
    told = [form.format(ordinal, text) for ordinal, text in zip(_COUNTED, texts, strict=False)]
    if not form:
        told = [draw.choice((f"The {NUMBER_WORDS[len(cases)]} cases: {'; '.join(texts)}.",
                             f"Once with {', once with '.join(texts)}."))]  # fmt: skip
    if shared := [_pair(*each, draw) for place, each in enumerate(given) if place not in varied]:
        always = draw.choice(("All have", "Each time with", "Always"))
        told.insert(draw.choice((0, len(told))), f"{always} {_listed(shared)}.")
    wish = _request(function, [], draw)
    both = ("for both", "for each of the two") if len(cases) == 2 else (f"for all {NUMBER_WORDS[len(cases)]}",)
    whom = f" {draw.choice((*both, 'for each of them', 'for each'))}" if len(cases) > 1 else ""
    told.insert(draw.choice((0, 0, len(told))), wish.rstrip(".?") + whom + ("?" if wish.endswith("?") else "."))
    calls = [[*given] for _ in cases]
    for made, case in zip(calls, cases, strict=True):
        for place, each in zip(varied, case, strict=True):
            made[place] = each
    return " ".join(told), calls


def _pair(item: Parameter, said: Said, draw: Random) -> str:
    return f"{draw.choice((item.words, item.name))} {draw.choice(('', '= ', 'of '))}{said.text}"


def _listed(texts: Sequence[str]) -> str:
    return f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else "".join(texts)


def _irrelevant(draw: Random, split: Split) -> tuple[list[dict[str, Any]], list[Function]]:
    """A request that no shown function serves: a question of general knowledge, or one for another function."""
    asked, *shown = _functions(draw.choice((2, 2, 2, 3, 4)), draw, split)
    if draw.random() < _SIBLING_SHARE / 2:
        near = [show_function(action, draw) for action in siblings(asked.action, draw, split)[: len(shown)]]
        shown = list({item.name: item for item in near if item.name != asked.name}.values()) or shown
    request = _request(asked, _given(asked, draw), draw)
    if draw.random() < 0.4:
        request = filled(draw.choice(grammar()["general"]), draw)
    return [
        {"role": "user", "content": request},
        {"role": "assistant", "content": draw.choice(grammar()["refusals"])},
    ], shown


def _missing(draw: Random, split: Split) -> tuple[list[dict[str, Any]], list[Function]]:
    """A request without a required value: the assistant asks for it, and calls when it has it."""
    while True:
        function, *others = _functions(draw.choice((1, 1, 2)), draw, split)
        if len(function.required) > 1:
            break
    absent = draw.choice(function.required)
    given = _given(function, draw, [absent])
    said = drawn_value(absent, draw)
    question = draw.choice(("Which {w} should I use?", "What is the {w}?", "Please tell me the {w}.")).format(
        w=absent.words
    )
    answer = draw.choice(("{v}", "The {w} is {v}.", "Take {v}.")).format(v=said.text, w=absent.words)
    messages = [
        {"role": "user", "content": _request(function, given, draw)},
        {"role": "assistant", "content": question},
        {"role": "user", "content": answer},
        _calls([function], [[*given, (absent, said)]]),
    ]
    return messages, draw.sample([function, *others], 1 + len(others))


def _turns(draw: Random, split: Split) -> tuple[list[dict[str, Any]], list[Function]]:
    """Several requests, each with the functions' results before the next."""
    shown = _functions(draw.randint(2, 4), draw, split)
    messages: list[dict[str, Any]] = []
    for _ in range(draw.randint(2, 3)):
        asked = draw.sample(shown, draw.choice((1, 1, 2)))
        messages += _exchange(asked, draw)
        messages += [
            {"role": "tool", "name": function.name, "content": json.dumps(_result(draw))} for function in asked
        ]
        messages.append(
            {"role": "assistant", "content": draw.choice(("Done.", "That is done.", "Here is the result."))}
        )
    return messages, shown


def _dependent(draw: Random, split: Split) -> tuple[list[dict[str, Any]], list[Function]]:
    """A call whose argument is in the result of another."""
    while True:
        first, second = _functions(2, draw, split)
        if second.required and first.action.language == second.action.language == "":
            break
    passed = draw.choice(second.required)
    said = drawn_value(passed, draw)
    first_given, second_given = _given(first, draw), _given(second, draw, [passed])
    request = _request(first, first_given, draw).rstrip(".?")
    then = _request(second, second_given, Random(1)).rstrip(".?")
    wish = f"{request}. Then {then[0].lower()}{then[1:]}, with the {passed.words} from that result."
    messages = [
        {"role": "user", "content": wish},
        _calls([first], [first_given]),
        {"role": "tool", "name": first.name, "content": json.dumps({passed.name: said.value, **_result(draw)})},
        _calls([second], [[*second_given, (passed, said)]]),
    ]
    return messages, draw.sample([first, second], 2)


def _result(draw: Random) -> dict[str, Any]:
    return {
        "status": draw.choice(("ok", "done", "success")),
        draw.choice(("count", "value", "total")): draw.randint(1, 999),
    }
