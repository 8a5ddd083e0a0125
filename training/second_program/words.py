"""What is printed: everyday words, numbers and random strings of one to eight characters.

Knows letters alone, not how they look. Words that name a colour, shape or place are left out: they are
answers to other questions. Random strings avoid characters that Pillow's font draws alike (O and 0; l, I
and 1).
"""

import numpy as np

_WORD_LIST = """
apple bread butter cheese coffee sugar salt pepper lemon onion potato tomato carrot banana cherry grape
melon peach rice pasta soup honey water juice milk tea cake cookie dinner lunch kitchen table chair window
door garden house street bridge river lake forest mountain beach island ocean summer winter spring autumn
monday friday sunday march june august morning evening night today later train bus taxi plane boat bicycle
ticket station airport hotel museum market school office doctor nurse teacher farmer pilot painter singer
mother father sister brother uncle cousin baby friend dog cat horse sheep goat rabbit tiger lion zebra
monkey eagle sparrow dolphin whale shark spider camera radio phone laptop printer battery engine wheel
hammer ladder bucket candle mirror pillow blanket pocket jacket shirt shoes gloves hat scarf money wallet
key letter paper pencil book story music guitar piano drum movie game puzzle ball team open closed exit
enter push pull stop slow fast help sale free menu hello thanks please welcome danger careful quiet happy
lucky clever gentle strong cloud storm rain snow thunder sunny windy planet rocket moon earth copper silver
iron zone jazz quick vote wax yoga exam fox kiwi quiz pizza budget export deliver harvest journey library
village
"""
_WORDS = tuple(_WORD_LIST.split())
_SAFE_LETTERS = "abcdefghjkmnpqrtuvwxyz"
_SAFE_DIGITS = "23456789"


def draw_text(rng: np.random.Generator) -> str:
    """A word (60 %), number (28 %) or random string, of 1 to 8 characters; words in any of three cases."""
    kind = rng.random()
    if kind < 0.6:
        word = _WORDS[rng.integers(len(_WORDS))]
        return (word.upper(), word.lower(), word.capitalize())[rng.integers(3)]
    if kind < 0.88:
        num_digits = int(rng.integers(1, 9))
        return str(rng.integers(10 ** (num_digits - 1), 10**num_digits))
    alphabet = _SAFE_LETTERS if rng.random() < 0.5 else _SAFE_LETTERS + _SAFE_DIGITS
    text = "".join(alphabet[rng.integers(len(alphabet))] for _ in range(rng.integers(3, 9)))
    return text.upper() if rng.random() < 0.5 else text
