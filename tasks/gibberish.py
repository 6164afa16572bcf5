"""Whether a text reads as words. Identifiers, names of files and prose do; generated passwords and keys do not."""

import re

_FOLLOWERS = (
    "abcdfgiklmnprstuvwxy baceijloprsuy cacehiklmorstuy dadefilorstu eabcdefgilmnopqrstvwxy faefilorstu gaeghilnorsu"
    " haeiortu iabcdefglmnoprstvxz jaeou keils lacdeilopstuy mabdeilmopstu nacdefgiklnopstuv oabcdfgiklmnoprstuvwx"
    " pacdehiloprstuy qu racdefgiklmnoprstuvy sacdefghiklmnopstuy tacdefhilmnoprstuwy uabcdefgilmnoprst vaeio waehinors"
    " xceipt yenpst ze"
)
"""Each letter with those that come after it: 96 % of the pairs in the words of Python's standard library."""
_READABLE = re.compile(
    "(?:" + "|".join(f"{pair[0]}(?=[{pair[1:]}])" for pair in _FOLLOWERS.split()) + "){2,}[a-z]", re.IGNORECASE
)
_RUN = re.compile("[A-Za-z0-9]+")
_SIGN = re.compile("[@#%^&*!+?~$]")
_WORD = re.compile(r"(?:[A-Z]?[a-z]+|[A-Z]+(?![a-z]))[0-9]*")
_SHORT_PART = re.compile(r"(?:[A-Z]{0,3}|[A-Z]?[a-z]{0,3})[0-9]*")
"""Of `test_gh19359_x2`, not of what has other signs."""
_NAME = re.compile(r"[\w.:/-]+", re.ASCII)


def n_unreadable(value: str) -> int:
    """Number of letters, digits and signs that belong to no word: a word has three letters or more, in one case or
    capitalised, of which each may follow the one before it in English; digits belong to the word before them.
    """
    is_name, unreadable = _NAME.fullmatch(value), len(_SIGN.findall(value))
    for run in _RUN.findall(value):
        if is_name and _SHORT_PART.fullmatch(run):
            continue
        unreadable += len(run)
        for word in _WORD.findall(run):
            letters = word.rstrip("0123456789")
            stretches = _READABLE.findall(letters)
            unreadable -= sum(map(len, stretches))
            if stretches and letters.endswith(stretches[-1]):
                unreadable -= len(word) - len(letters)
    return unreadable


def is_gibberish(value: str, least: int = 5) -> bool:
    """Whether so many of the letters and digits, and two in five, belong to no word."""
    unreadable = n_unreadable(value)
    return unreadable >= least and unreadable >= 0.4 * sum(map(len, _RUN.findall(value)))
