"""Other spellings of the names of methods. Light to import: a recipe is read without torch.

>>> canonical_method_name("FedAvgPlus"), canonical_method_name("rfa+"), canonical_method_name("mine")
('fedavg+', 'fedgeomed+', 'mine')
"""

from __future__ import annotations

METHOD_NAMES = (
    *("local", "fedavg", "fedprox", "rfa", "comed", "fed+", "fedavg+", "fedgeomed+", "fedcomed+", "fed+fixed"),
    *("fed+v1", "l2gd", "ditto", "apfl", "pfedme", "fedper", "fedrep", "fedasync", "fedbuff", "fedrl"),
)
"""The canonical names: the keys of `ALGORITHMS`."""

_ALIASES = {
    "avg+": "fedavg+",
    "comed+": "fedcomed+",
    "coordinatemedian": "comed",
    "coordinatemedian+": "fedcomed+",
    "fedcomed": "comed",
    "fedgeomed": "rfa",
    "geomed": "rfa",
    "geomed+": "fedgeomed+",
    "geometricmedian": "rfa",
    "geometricmedian+": "fedgeomed+",
    "rfa+": "fedgeomed+",
    "standalone": "local",
}


def canonical_method_name(name: str) -> str:
    """Return the canonical name of a method; a name that is not known is returned as it is."""
    compact = "".join(character for character in name.casefold() if character not in " _-").replace("plus", "+")
    known = _ALIASES.get(compact, compact)
    return known if known in METHOD_NAMES else name
