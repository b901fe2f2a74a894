"""The sentences that the demo embeds: several on each topic, so that it shows which are near each other."""

from __future__ import annotations

from typing import Final

TOPICS: Final[dict[str, tuple[str, ...]]] = {
    "space": (
        "The telescope photographed a galaxy twelve billion light years away.",
        "Astronauts repaired the station's solar panel during a long spacewalk.",
        "A probe landed on the far side of the moon last night.",
        "Saturn's rings are made of ice and dust.",
        "The rocket's second stage failed to reach orbit.",
        "Astronomers found a planet that circles two stars.",
    ),
    "cooking": (
        "Fry the onions in butter until they are golden.",
        "Let the dough rise for an hour before you bake the bread.",
        "A pinch of salt brings out the flavour of the chocolate.",
        "She stirred the tomato soup and added fresh basil.",
        "Roast the potatoes with rosemary and a little olive oil.",
        "The recipe calls for three eggs and a cup of flour.",
    ),
    "sport": (
        "The striker scored twice in the last ten minutes of the match.",
        "She won the marathon in just under two and a half hours.",
        "Their goalkeeper saved a penalty and kept the team in the cup.",
        "The tennis final went to a fifth set.",
        "He broke the national record in the hundred metres.",
        "Fans filled the stadium long before the game began.",
    ),
    "weather": (
        "Heavy rain is expected along the coast this evening.",
        "The storm brought down trees and cut off the power.",
        "It hasn't snowed here in December for twenty years.",
        "A warm wind from the south melted the last of the ice.",
        "Fog delayed the morning ferry by two hours.",
        "The heatwave will last until the end of the week.",
    ),
    "money": (
        "The central bank raised interest rates by a quarter of a point.",
        "Shares in the company fell after it reported a loss.",
        "Inflation has slowed for the third month in a row.",
        "They took out a mortgage to buy their first house.",
        "Investors are moving their savings into government bonds.",
        "The budget deficit is smaller than economists had feared.",
    ),
    "music": (
        "The orchestra opened the evening with a symphony by Brahms.",
        "He taught himself to play the guitar from old records.",
        "The choir sang without any instruments.",
        "Her new album was recorded live in a small jazz club.",
        "The violinist broke a string in the middle of the concerto.",
        "A drummer keeps the rhythm for the whole band.",
    ),
    "software": (
        "The function returns an empty list if nothing was found.",
        "A bug in the parser crashed the server at midnight.",
        "We rewrote the service to use less memory.",
        "The tests pass on my machine but fail on the build server.",
        "Merge the branch once somebody has reviewed the code.",
        "The compiler warns about a variable that is never used.",
    ),
}

SENTENCES: Final = tuple(sentence for sentences in TOPICS.values() for sentence in sentences)
