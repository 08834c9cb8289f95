"""What imgkit and pip noted in an image, collected while its files pass by."""

from __future__ import annotations

import json

from imgkit_builder.archive.tar_read import REGULAR
from imgkit_builder.sif.baked_facts import BakedFacts, BakedFactsCollector, Distribution
from imgkit_builder.sif.entries import ImageEntry


def collect_facts(files: dict[str, bytes], path: str = "/usr/bin:/opt/v/bin") -> BakedFacts:
    collector = BakedFactsCollector()
    entries = [ImageEntry(names=(name,), kind=REGULAR).with_content(data) for name, data in files.items()]
    passed = {entry.name: entry.read() for entry in collector.observe(entries)}
    assert passed == files
    return collector.facts(path)


def test_packages_that_python_finds_are_facts():
    origin = json.dumps({"url": "file:///work/my%20code", "dir_info": {"editable": True}}).encode()
    info = "usr/local/lib/python3.11/dist-packages/my_code-1.dist-info"
    facts = collect_facts(
        {
            "opt/imgkit/manifest.json": b"{}",
            f"{info}/METADATA": b"",
            f"{info}/direct_url.json": origin,
            "opt/v/lib/python3.12/site-packages/a-b-2.dist-info/METADATA": b"",
            "opt/other/lib/python3.12/site-packages/hidden-2.dist-info/METADATA": b"",
        }
    )
    assert facts.manifest == "{}"
    assert facts.distributions == (
        Distribution(name="a-b"),
        Distribution(name="my_code", folder="/work/my code"),
    )


def test_file_that_is_too_large_is_no_fact():
    assert collect_facts({"opt/imgkit/manifest.json": bytes(2 << 20)}).manifest == ""


def test_lock_leaves_only_packages_with_an_origin():
    folder = "usr/lib/python3/dist-packages"
    facts = collect_facts(
        {
            "opt/imgkit/lock.toml": b"",
            f"{folder}/a-1.dist-info/METADATA": b"",
            f"{folder}/b-1.dist-info/METADATA": b"",
            f"{folder}/b-1.dist-info/direct_url.json": b"damaged",
        }
    )
    assert facts.distributions == (Distribution(name="b"),)
