"""Apart: values whose layouts concern no other value go their own ways.

in:  states, which are all combinations of the layouts that some values could have
out: as few as those values' partners need, in which each of them has one code for all of its layouts

    text: R or S(1), pictures: R or S(1) or S(2), x: R   =>   one state in place of six, until something reads both
"""

from __future__ import annotations

from tpplan.compiler.place.body import Codes
from tpplan.compiler.place.entry_layouts import States
from tpplan.compiler.place.open_results import OpenResults, Option
from tpplan.compiler.place.solution import Cost, SeparatePart, Steps


def apart(states: States, results: OpenResults) -> States:
    """The states with one code for all that a value could be, where that depends on no other value.

    They're as many as the values' layouts then, and not as their combinations; what was chosen so far is found in
    these states, once each value has its layout.
    """
    base = min(states, key=lambda state: states[state][0])
    floor = states[base][0]
    places = [place for place in range(len(base)) if _is_apart(states, base, place)]
    if not places:
        return states
    kept = {state: way for state, way in states.items() if all(state[place] == base[place] for place in places)}
    codes: dict[int, int] = {}
    for place in places:
        options: list[Option] = []
        for code in dict.fromkeys(state[place] for state in states):
            cost = states[(*base[:place], code, *base[place + 1 :])][0]
            trail = Steps(SeparatePart(states, place, (code,)), None)
            options.append(Option(code, (cost[0] - floor[0], cost[1] - floor[1]), trail, decided=False))
        codes[place] = results.code(options, (id(states), place))
    made: States = {}
    for state, (cost, _) in kept.items():
        after = tuple(codes.get(place, code) for place, code in enumerate(state))
        made[after] = (cost, Steps(SeparatePart(states, None, state), None))
    return made


def _is_apart(states: States, base: Codes, place: int) -> bool:
    """Whether a value can have each of its layouts, at a cost of its own, whatever the others have."""
    codes = {state[place] for state in states}
    if len(codes) == 1 or min(codes) < 0:
        return False
    floor = states[base][0]
    extra: dict[int, Cost] = {}
    for code in codes:
        way = states.get((*base[:place], code, *base[place + 1 :]))
        if way is None:
            return False
        extra[code] = (way[0][0] - floor[0], way[0][1] - floor[1])
    count = 0
    for state, (cost, _) in states.items():
        if state[place] == base[place]:
            count += 1
            continue
        way = states.get((*state[:place], base[place], *state[place + 1 :]))
        more = extra[state[place]]
        if way is None or cost != (way[0][0] + more[0], way[0][1] + more[1]):
            return False
    return count * len(codes) == len(states)


__all__ = ["apart"]
