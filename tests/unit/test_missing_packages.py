"""Where all packages are required, one that is missing fails what needs it, a whole file or one test."""

from __future__ import annotations

import pytest

MISSING = 'pytest.importorskip("no_such_package")'
FILES = {
    "file": f"import pytest\n{MISSING}\ndef test_a(): pass\n",
    "test": f"import pytest\ndef test_a(): {MISSING}\ndef test_b(): pass\n",
    "expected failure": "import pytest\n@pytest.mark.xfail\ndef test_a(): assert 0\n",
    "optional": "import pytest\ndef test_a(): pytest.importorskip('no_such_package', reason='optional')\n",
}


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("is_required", [False, True], ids=["skipped", "required"])
def test_a_missing_package(pytester, what, is_required):
    path = pytester.makepyfile(FILES[what])
    options = ["-p", "support.missing_packages", "-q", *(["--all-packages"] if is_required else [])]
    result = pytester.runpytest_inprocess(*options, path)
    fails = is_required and what in ("file", "test")
    expected = int(fails) if what != "file" else 2 if fails else 5  # 5: nothing was collected
    assert result.ret == expected
    assert ("could not import 'no_such_package'" in result.stdout.str()) == fails
