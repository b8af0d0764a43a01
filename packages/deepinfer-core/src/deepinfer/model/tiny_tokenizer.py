"""The tokenizer of the embedded tiny model: byte-level BPE over a page of plain English, with V4.1's special tokens.

What the model does with the ids is `tiny.py`'s.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512

CONTROL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    *(f"<｜{slash}{name}｜>" for name in ("ref", "box", "point", "polygon") for slash in ("", "/")),
)
"""Tokens that decoding may skip; the first three have the released ids 0, 1, 2."""

SYSTEM_TOKEN = "<｜System｜>"
IMAGE_TOKEN = "<｜deepseek_image｜>"

MARKUP_TOKENS = (
    SYSTEM_TOKEN,
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    IMAGE_TOKEN,
)
"""Tokens that are ordinary text to a decoder, as in the released tokenizer."""

TEXT = """\
Once upon a time there was a small house at the edge of a forest. An old woman lived in it with her cat, and every
morning she opened the window and looked at the sea. The water was grey in winter and green in summer. When the wind
came from the north, the trees bent down and the birds were silent; when it came from the south, they sang all day.
"What will you do today?" asked the cat. "I will write a letter," said the woman, "and you will carry it to my sister
on the other side of the mountain." The cat did not like the mountain, because the path was long and full of stones,
but he liked the sister, who always had fresh milk for him. So he took the letter and went out into the light.
On the way he met a fox, two sheep and a man with a red hat. The man had lost his way. He had walked for three days,
he said, and nobody could tell him where the river was. "Follow me," said the cat, "for I know every river between here
and the moon." They went on together, through the fields and over the bridge, until they came to a town. There were
people in the streets, children with bread in their hands, and music from an open door. In the middle of the town stood
a tower with a clock that showed a different hour on each of its four sides. Nobody knew which one was right, and so
everybody had as much time as they needed. The cat thought that this was a good place, and that he would tell his
friend about it. Then he drank some milk, delivered the letter, and walked home under the stars.
"""


def make_tokenizer() -> Tokenizer:
    """Train the tokenizer: VOCAB_SIZE tokens, the special ones first, then all 256 bytes, then pieces of words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    markup = [AddedToken(token, special=False, normalized=True) for token in MARKUP_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        show_progress=False,
        special_tokens=[*control, *markup],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    return tokenizer
