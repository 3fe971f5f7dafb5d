#!/usr/bin/env python3
"""Writes prompts as JSON lines: a sentence with each word is asked for; some words are held out, others trained on.

    {"text": "Write a short sentence with the word river.", "answer": "river"}
"""

import argparse
import json
import pathlib
import random

NUM_HELD_OUT = 200
WORDS = """
acorn actor airport anchor angel ankle apple apron arm army arrow artist attic aunt autumn baby bag baker ball balloon
banana band bank barn basket bath beach bean bear beard bed bee bell belt bench berry bicycle bird blanket boat body bone
book boot bottle bowl box boy branch brass bread breakfast brick bridge broom brother brush bucket bus butter butterfly
button cabin cage cake camel camera camp candle canoe captain car card carpet carrot castle cat cave chain chair chalk
cheese cherry chess chicken child chimney church circle city clock cloth cloud clover coach coal coat coffee coin comb
cook copper corn cotton cousin cow crab cradle crow crown cup curtain dance daughter dentist desert desk diamond dinner
dish doctor dog doll donkey door dragon drawer dream dress drum duck eagle ear earth egg elbow engine evening eye face
family farm farmer feather fence field finger fire fish flag flame flower flute fog forest fork fountain fox friend frog
fruit garden garlic gate ghost gift giraffe girl glass glove goat gold goose grandmother grape grass guitar hammer hand
harbor hat hawk heart helmet hen hill honey horse hotel hour house ice island ivory jacket jar jewel juice jungle kettle
key king kitchen kite kitten knife ladder lake lamb lamp lantern leaf leather lemon letter library lion lock log lunch
machine magnet map market mask meadow medal melon milk mirror money monkey moon morning mother mountain mouse mouth
mushroom music nail neck needle nest night nose notebook nurse oak ocean office oil onion orange orchard oven owl ox paint
palace paper park parrot party peach peanut pear pearl pen pencil pepper piano picture pie pig pillow pilot pine pipe
planet plate pocket poem poet pond pony poster potato prince pumpkin puppy queen rabbit radio railway rain rainbow ribbon
rice ring river road robin rock roof room root rope rose sail salt sand sandwich scarf school scissors sea seed shadow
sheep shelf shell ship shirt shoe shop shoulder silver sister skirt sky snail snake snow soap soldier song soup spider
spoon spring square stable stairs star station stone storm story stove street sugar summer sun sweater swan sword table
tailor tea teacher tent theater thread throat thumb ticket tiger toast tomato tooth tower town toy train tree truck
trumpet turtle umbrella uncle valley vase village violin wagon wall water wave whale wheat wheel whistle wind window
winter wolf wood wool yard
""".split()


def rows(seed=1):
    """(training rows, held-out rows): of different words, the same for the same seed."""
    words = list(WORDS)
    random.Random(seed).shuffle(words)
    made = [{"text": f"Write a short sentence with the word {word}.", "answer": word} for word in words]
    return made[NUM_HELD_OUT:], made[:NUM_HELD_OUT]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory for train.jsonl and held_out.jsonl")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, part in zip(("train", "held_out"), rows()):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{out}/{name}.jsonl: {len(part)} prompts")
