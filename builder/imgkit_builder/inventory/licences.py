"""SPDX expressions from the words in which packages state their licences.

A word that may mean several licences ("BSD", "GPL") gives no expression: a guess would look like a fact.
`KNOWN` is the part of https://spdx.org/licenses/ that packages of images use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_KNOWN = """
0BSD AFL-2.1 AFL-3.0 AGPL-3.0-only AGPL-3.0-or-later Apache-1.1 Apache-2.0 APSL-2.0 Artistic-1.0
Artistic-1.0-Perl Artistic-2.0 Beerware BSD-1-Clause BSD-2-Clause BSD-2-Clause-Patent BSD-3-Clause
BSD-3-Clause-Clear BSD-4-Clause BSD-4-Clause-UC BSL-1.0 bzip2-1.0.6 CC-BY-3.0 CC-BY-4.0 CC-BY-SA-3.0
CC-BY-SA-4.0 CC0-1.0 CDDL-1.0 CECILL-2.1 CECILL-B CECILL-C CNRI-Python curl ECL-2.0 EPL-1.0 EPL-2.0
EUPL-1.2 FSFAP FSFUL FSFULLR FTL GFDL-1.1-only GFDL-1.1-or-later GFDL-1.2-only GFDL-1.2-or-later
GFDL-1.3-only GFDL-1.3-or-later GPL-1.0-only GPL-1.0-or-later GPL-2.0-only GPL-2.0-or-later GPL-3.0-only
GPL-3.0-or-later HPND ICU IJG ISC JSON LGPL-2.0-only LGPL-2.0-or-later LGPL-2.1-only LGPL-2.1-or-later
LGPL-3.0-only LGPL-3.0-or-later Libpng LPPL-1.3c MirOS MIT MIT-0 MIT-CMU MPL-1.1 MPL-2.0 MS-PL NAIST-2003
NCSA OFL-1.0 OFL-1.1 OLDAP-2.8 OpenSSL PHP-3.01 PostgreSQL PSF-2.0 Python-2.0 Python-2.0.1 QPL-1.0 Ruby
SISSL Sleepycat TCL Unicode-3.0 Unicode-DFS-2016 Unlicense UPL-1.0 Vim W3C WTFPL X11 Xnet Zlib
zlib-acknowledgement ZPL-2.0 ZPL-2.1
"""
_EXCEPTIONS = """
Autoconf-exception-2.0 Autoconf-exception-3.0 Bison-exception-2.2 Classpath-exception-2.0
Font-exception-2.0
GCC-exception-2.0 GCC-exception-3.1 Libtool-exception LLVM-exception
"""
KNOWN = frozenset(_KNOWN.split())
EXCEPTIONS = frozenset(_EXCEPTIONS.split())
_BY_LOWER = {one.lower(): one for one in KNOWN | EXCEPTIONS}
_WORDS: Mapping[str, str] = {
    "mit license": "MIT",
    "the mit license": "MIT",
    "expat": "MIT",
    "isc license": "ISC",
    "cc0": "CC0-1.0",
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache-2": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache license version 2.0": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0",
    "2-clause bsd": "BSD-2-Clause",
    "bsd 2-clause": "BSD-2-Clause",
    "bsd 2-clause license": "BSD-2-Clause",
    "3-clause bsd": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "new bsd license": "BSD-3-Clause",
    "modified bsd license": "BSD-3-Clause",
    "mpl 2.0": "MPL-2.0",
    "mozilla public license 2.0": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
    "psf": "PSF-2.0",
}
_CLASSIFIERS: Mapping[str, str] = {
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "Boost Software License 1.0 (BSL-1.0)": "BSL-1.0",
    "zlib/libpng License": "Zlib",
    "GNU General Public License v2 (GPLv2)": "GPL-2.0-only",
    "GNU General Public License v2 or later (GPLv2+)": "GPL-2.0-or-later",
    "GNU General Public License v3 (GPLv3)": "GPL-3.0-only",
    "GNU General Public License v3 or later (GPLv3+)": "GPL-3.0-or-later",
    "GNU Lesser General Public License v2 or later (LGPLv2+)": "LGPL-2.0-or-later",
    "GNU Lesser General Public License v3 (LGPLv3)": "LGPL-3.0-only",
    "GNU Lesser General Public License v3 or later (LGPLv3+)": "LGPL-3.0-or-later",
    "GNU Affero General Public License v3": "AGPL-3.0-only",
    "GNU Affero General Public License v3 or later (AGPLv3+)": "AGPL-3.0-or-later",
}
_GNU = re.compile(r"(A?GPL|LGPL|GFDL)-([1-3](?:\.[0-3])?)(\+?)", re.IGNORECASE)
_WORD = re.compile(r"\(|\)|[^\s()]+")
_MOST_CHARACTERS = 2000
_SHOWN = 200


def shortened(text: str) -> str:
    """`text` on one line, in a length that a document can repeat."""
    line = "".join(one if one.isprintable() else " " for one in " ".join(text[: 2 * _SHOWN].split()))
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def expression(text: str) -> str:
    """The SPDX expression `text` in its usual spelling; empty where it is none, or a licence is unknown."""
    if len(text) > _MOST_CHARACTERS:
        return ""
    words: list[str] = []
    open_brackets, wants = 0, "licence"
    for word in _WORD.findall(text):
        if word == "(" and wants == "licence":
            open_brackets += 1
        elif word == ")" and wants == "operator" and open_brackets:
            open_brackets -= 1
        elif wants == "operator" and word.upper() in ("AND", "OR", "WITH"):
            word = word.upper()
            wants = "exception" if word == "WITH" else "licence"
        elif wants != "operator" and word not in "()":
            found = _BY_LOWER.get(word.lower(), "")
            if found not in (EXCEPTIONS if wants == "exception" else KNOWN):
                return ""
            word, wants = found, "operator"
        else:
            return ""
        words.append(word)
    if wants != "operator" or open_brackets:
        return ""
    return " ".join(words).replace("( ", "(").replace(" )", ")")


def from_text(text: str) -> str:
    """The SPDX expression that the free words of a Python package mean for sure; empty where they do not."""
    plain = " ".join(text.split()) if len(text) <= _SHOWN else ""
    return _WORDS.get(plain.lower().rstrip("."), "") or expression(plain)


def from_classifier(text: str) -> str:
    """The SPDX id that a trove classifier means for sure; empty where it stands for several licences."""
    return _CLASSIFIERS.get(text.rpartition(" :: ")[2], "")


def from_debian(text: str) -> str:
    """The SPDX expression of a licence's short name in debian/copyright; empty where there is none."""
    if "," in text or "/" in text or len(text) > _MOST_CHARACTERS:
        return ""
    return expression(" ".join(_debian_word(word) for word in _WORD.findall(text)))


def _debian_word(word: str) -> str:
    gnu = _GNU.fullmatch(word)
    if gnu:
        name, version, later = gnu.groups()
        dotted = version if "." in version else f"{version}.0"
        return f"{name.upper()}-{dotted}-{'or-later' if later else 'only'}"
    return "Artistic-1.0" if word == "Artistic" else _WORDS.get(word.lower(), word)


def all_of(expressions: Iterable[str]) -> str:
    """One expression for a package to whose parts `expressions` apply."""
    found = sorted(set(expressions))
    if len(found) == 1:
        return found[0]
    return " AND ".join(f"({one})" if " OR " in one else one for one in found)
