"""Laws of the offline bundle: what is selected, that it is for the host, that it unpacks as built."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from sglang_fp8rl.lab.demo.show import Screen

REPOSITORY = Path(__file__).parents[3]

from tools.offline_bundle import archive, elf, recipe, staging  # noqa: E402
from tools.offline_bundle.build import BuildOptions, build  # noqa: E402
from tools.offline_bundle.elf import unloadable_segments  # noqa: E402
from tools.offline_bundle.errors import BundleError  # noqa: E402
from tools.offline_bundle.pins import canonical, read_pins  # noqa: E402
from tools.offline_bundle.records import read_record, shrink_record  # noqa: E402
from tools.offline_bundle.selection import Drop, select, undecided  # noqa: E402
from tools.offline_bundle.wheel_tags import fits_host, wheel_file_tags  # noqa: E402

HOST = REPOSITORY / "tools" / "offline_bundle" / "host"
STAND_INS = HOST.with_name("stand_ins")

segments = st.sampled_from(["a", "b", "tests", "lib.so", "x.py", "x.pyi", "with, comma.json"])
paths = st.lists(segments, min_size=1, max_size=4).map("/".join)
patterns = st.sampled_from(["*", "*.so", "*.pyi", "*/tests/*", "a/*", "no such file"])


def test_every_pin_is_taken_or_left_out_and_nothing_else_is_named():
    pins = read_pins(REPOSITORY / "constraints" / "oldest.txt") | recipe.UNCONSTRAINED
    assert undecided(pins, recipe.TAKEN, recipe.LEFT_OUT) == []


def test_what_no_constraints_file_has_is_what_the_environments_install():
    makefile = (REPOSITORY / "Makefile").read_text()
    for name, version in recipe.UNCONSTRAINED.items():
        assert f"--no-deps {name}=={version}" in makefile


@pytest.mark.parametrize(
    ("pins", "taken", "left_out", "complaint"),
    [
        ({"a": "1", "b": "1"}, {"a"}, {}, "b: undecided"),
        ({"a": "1"}, {"a"}, {"a": "why"}, "a: taken and left out"),
        ({}, {"a"}, {}, "a: not pinned"),
        ({}, set(), {"a": "why"}, "a: not pinned"),
    ],
)
def test_a_pin_that_is_not_decided_once_is_named(pins, taken, left_out, complaint):
    assert undecided(pins, taken, left_out) == [complaint]


@pytest.mark.parametrize("line", ["a>=1", "a", "a==1; python_version<'3'", "a==1 b==2", "-r x"])
def test_a_line_that_is_no_exact_pin_is_refused(tmp_path, line):
    path = tmp_path / "pins.txt"
    path.write_text(f"fine==1  # as it should be\n\n{line}\n")
    with pytest.raises(BundleError, match=r"pins\.txt:3"):
        read_pins(path)


def test_a_name_pinned_twice_under_two_spellings_is_refused(tmp_path):
    path = tmp_path / "pins.txt"
    path.write_text("Some_Name==1\nsome.name==2\n")
    with pytest.raises(BundleError, match="twice"):
        read_pins(path)
    assert canonical("Some__Name.x") == "some-name-x"


@settings(deadline=None)  # a machine may be busy
@given(st.lists(paths, unique=True), st.lists(patterns, max_size=4))
def test_every_file_is_kept_or_dropped_and_never_both(files, dropped):
    chosen = select("name", files, [Drop("*", pattern, "why") for pattern in dropped])
    assert sorted([*chosen.kept, *chosen.dropped]) == sorted(files)
    assert all(rule.pattern != "no such file" for rule in chosen.dropped.values())


@settings(deadline=None)  # a machine may be busy
@given(st.lists(paths, unique=True, min_size=1))
def test_what_must_be_kept_is_kept_against_every_rule(files):
    chosen = select("name", files, [Drop("name", "*", "why")], keep=[files[0].replace(",", "?")])
    assert files[0] in chosen.kept
    assert set(chosen.kept) | set(chosen.dropped) == set(files)


def test_rules_of_other_distributions_do_not_apply():
    assert select("name", ["a.so"], [Drop("other", "*.so", "why")]).kept == ["a.so"]


@pytest.mark.parametrize(
    ("drops", "keep"), [([Drop("name", "*.so", "why")], []), ([], ["lib/*.so"])]
)
def test_a_rule_for_another_version_of_the_files_is_refused(drops, keep):
    with pytest.raises(BundleError, match="matches no file"):
        select("name", ["a.py"], drops, keep)


@pytest.mark.parametrize(
    ("tag", "fits"),
    [
        ("cp312-cp312-manylinux_2_28_x86_64", True),
        ("cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64", True),
        ("cp39-abi3-manylinux_2_31_x86_64", True),
        ("py2.py3-none-any", True),
        ("py3-none-manylinux1_x86_64", True),
        ("cp311-cp311-manylinux_2_28_x86_64", False),
        ("cp313-abi3-manylinux_2_28_x86_64", False),
        ("cp312-cp312t-manylinux_2_28_x86_64", False),
        ("cp312-cp312-manylinux_2_35_x86_64", False),
        ("cp312-cp312-manylinux_2_28_aarch64", False),
        ("cp312-cp312-musllinux_1_2_x86_64", False),
        ("py2-none-any", False),
    ],
)
def test_only_wheels_for_the_host_fit(tag, fits):
    assert fits_host(wheel_file_tags(f"Wheel-Version: 1.0\nTag: {tag}\n")) is fits


def test_a_record_with_commas_in_its_names_survives(tmp_path):
    info = tmp_path / "name-1.dist-info"
    info.mkdir()
    (info / "RECORD").write_text('"configs/N=1,K=2.json",sha256=x,3\nname/a.so,sha256=y,4\n')
    kept = read_record(info)
    assert kept == ["configs/N=1,K=2.json", "name/a.so"]
    shrink_record(info, kept)
    assert read_record(info) == kept
    assert "sha256" not in (info / "RECORD").read_text()


def test_a_record_is_not_written_through_to_the_cache_it_is_linked_to(tmp_path):
    info = tmp_path / "name-1.dist-info"
    info.mkdir()
    cached = tmp_path / "cached"
    cached.write_text("a.py,sha256=x,1\n")
    os.link(cached, info / "RECORD")
    shrink_record(info, [])
    assert cached.read_text() == "a.py,sha256=x,1\n"


@pytest.mark.parametrize("native", [False, True])
def test_the_same_files_give_the_same_bytes_whenever_they_were_written(tmp_path, native):
    digests = []
    for when in (1, 1_000_000):
        root = tmp_path / str(when)
        (root / "a").mkdir(parents=True)
        (root / "a" / "x.py").write_text("x")
        (root / "tool").write_bytes(bytes(range(256)) * 64)
        (root / "tool").chmod(0o700)
        for name in ("a/x.py", "tool"):
            os.utime(root / name, (when, when))
        packed = tmp_path / f"{when}.tar.xz"
        archive.write_xz_tar(packed, root, ["a/x.py", "tool"], native=native, level=0)
        digests.append(archive.sha256(packed))
    assert digests[0] == digests[1]


def test_names_longer_than_the_first_tars_allowed_survive(tmp_path):
    name = f"{'d' * 60}/{'E=512,N=128,' * 15}.json"  # SGLang's tuning tables
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("{}")
    archive.write_xz_tar(tmp_path / "a.tar.xz", tmp_path, [name], native=False, level=0)
    with tarfile.open(tmp_path / "a.tar.xz") as tar:
        assert tar.getnames() == [name]


def test_an_edit_is_written_to_a_file_of_its_own_and_once(tmp_path):
    cached = tmp_path / "cached.py"
    cached.write_text("import a\nimport b\n")
    os.link(cached, tmp_path / "x.py")
    staging.apply_edits([staging.Edit("x.py", "import a", "raise ImportError")], tmp_path)
    assert (tmp_path / "x.py").read_text() == "raise ImportError\nimport b\n"
    assert cached.read_text() == "import a\nimport b\n"
    for wrong in ("import c", "r"):
        with pytest.raises(BundleError, match="stands there once"):
            staging.apply_edits([staging.Edit("x.py", wrong, "")], tmp_path)


def test_a_machine_that_can_t_check_a_bundle_says_so_before_it_builds_one(tmp_path, monkeypatch):
    shim = (
        tmp_path / "bin" / "uv"
    )  # as of a version manager, whose Python of that version is not active
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\necho 'python3.12: command not found' >&2; exit 127\n")
    shim.chmod(0o755)
    built = []
    monkeypatch.setattr(staging, "unpack_wheels", lambda *_: built.append("wheels"))
    options = BuildOptions(shim, Path(sys.executable), tmp_path, tmp_path / "dist", 60, 0)
    with pytest.raises(
        BundleError, match=r"python3\.12: command not found.*It needs Python 3\.12, gcc"
    ):
        build(options, Screen(Console()))
    shim.write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(shim.parent))
    with pytest.raises(BundleError, match=r"gcc --version.*No such file"):
        build(options, Screen(Console()))
    assert not built
    assert not options.output.exists()


def test_what_a_host_could_not_import_is_named_with_its_error():
    from tools.offline_bundle import imports_of_a_host

    assert imports_of_a_host.error_of("json") == ""
    assert "No module named 'of_no_package'" in imports_of_a_host.error_of("of_no_package.x")


def test_norms_of_the_bundle_never_ask_for_the_sources_that_were_left_out():
    """FlashInfer's sources are dropped, so whoever imports its norms at will is edited, on the pinned version."""
    dropped = [rule for rule in recipe.DROPS if rule.distribution == "flashinfer-python"]
    assert [rule.pattern for rule in dropped] == ["flashinfer/data/*"]
    assert {edit.path for edit in recipe.EDITS} == {
        "sgl_kernel/elementwise.py",
        "sgl_kernel/sampling.py",
    }


def test_alike_files_lie_together():
    names = ["b/x.so", "a/y.py", "c/x.so", "a/x.py"]
    assert sorted(names, key=archive.by_kind) == ["a/x.py", "a/y.py", "b/x.so", "c/x.so"]


def test_stripping_keeps_what_the_loader_reads_and_the_file_it_was_linked_to(tmp_path):
    import _ctypes

    original = tmp_path / "cached.so"
    original.write_bytes(Path(_ctypes.__file__).read_bytes())
    before = hashlib.sha256(original.read_bytes()).hexdigest()
    linked = tmp_path / Path(_ctypes.__file__).name
    os.link(original, linked)
    won = sum(elf.strip_symbols([linked]))
    assert won == original.stat().st_size - linked.stat().st_size
    assert hashlib.sha256(original.read_bytes()).hexdigest() == before
    load = f"import ctypes; ctypes.PyDLL({str(linked)!r}).PyInit__ctypes"
    subprocess.run([sys.executable, "-c", load], check=True)


def test_a_segment_that_the_loader_refuses_is_seen():
    good = "  LOAD  0x15b6d00 0x00000000015b7d00 0x00000000015b7d00 0x015304 0x01d148 RW  0x1000"
    bad = "  LOAD  0x15e2184 0x000000000162a000 0x000000000162a000 0x000000 0x000000 RW  0x1000"
    shown = (
        f"Program Headers:\n  Type Offset\n{good}\n{bad}\n  GNU_STACK 0x0 0x0 0x0 0x0 0x0 RW 0x10"
    )
    assert unloadable_segments(shown) == [" ".join(bad.split())]


@pytest.fixture
def bundle(tmp_path):
    """A bundle of one module, made for the interpreter that runs the tests."""
    folder = tmp_path / "bundle"
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "bundled_module.py").write_text("WHERE = __file__\n")
    archive.write_xz_tar(
        folder / "python.tar.xz", folder / "site", ["bundled_module.py"], native=False, level=0
    )
    for path in HOST.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            (folder / path.relative_to(HOST)).parent.mkdir(exist_ok=True)
            (folder / path.relative_to(HOST)).write_bytes(path.read_bytes())
    host = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "glibc": "2.5",
        "torch": "",
        "triton": "",
        "cuda": "13",
    }
    parts = {"python.tar.xz": archive.sha256(folder / "python.tar.xz")}
    (folder / "manifest.json").write_text(json.dumps({"host": host, "parts": parts}))
    return folder


def install(bundle, *arguments):
    command = [sys.executable, str(bundle / "install.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=bundle)


def test_an_installed_bundle_is_in_front_and_writes_to_its_folder_alone(bundle, tmp_path):
    before = sorted(path for path in tmp_path.rglob("*"))
    target = tmp_path / "target with space"
    result = install(bundle, target, "--force")
    assert result.returncode == 0, result.stderr
    outside = [path for path in tmp_path.rglob("*") if target not in (path, *path.parents)]
    assert sorted(outside) == before
    show = "import bundled_module, os; print(bundled_module.WHERE, os.environ['TVM_FFI_CACHE_DIR'])"
    moved = target.rename(tmp_path / "moved")  # the folder may be moved as a whole
    command = [moved / "bin" / "python", "-c", show]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown == f"{moved}/site-packages/bundled_module.py {moved}/cache/tvm-ffi\n"


def test_an_nvcc_outside_of_its_toolkit_does_not_name_one(bundle, tmp_path):
    """A wrapper script on the path is not where `-lcudart` is found."""
    toolkit, wrapper = tmp_path / "cuda", tmp_path / "wrapper"
    for folder in (toolkit, wrapper):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "nvcc").write_text("#!/bin/sh\n")
        (folder / "bin" / "nvcc").chmod(0o755)
    (toolkit / "lib64").mkdir()
    (toolkit / "lib64" / "libcudart.so").touch()
    assert install(bundle, tmp_path / "target", "--force").returncode == 0
    show = "import os; print(os.path.realpath(os.environ.get('CUDA_HOME', '')))"
    found = {}
    for folder in (toolkit, wrapper):
        environment = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
        environment.pop("CUDA_HOME", None)
        command = [tmp_path / "target" / "bin" / "python", "-c", show]
        result = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=True
        )
        found[folder] = result.stdout.strip()
    assert found[toolkit] == str(toolkit)
    assert found[wrapper] != str(wrapper)


def test_a_host_it_was_not_made_for_is_named_and_nothing_is_written(bundle, tmp_path):
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["host"] |= {"python": "3.99", "glibc": "9.9", "torch": "0.1."}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    result = install(bundle, tmp_path / "target")
    assert result.returncode == 1
    for words in ("are for 3.99", "glibc", "made for 0.1."):
        assert words in result.stderr
    assert not (tmp_path / "target").exists()


def test_a_damaged_part_is_refused(bundle, tmp_path):
    with (bundle / "python.tar.xz").open("ab") as file:
        file.write(b"\0")
    result = install(bundle, tmp_path / "target", "--force")
    assert result.returncode == 2
    assert "python.tar.xz" in result.stderr
    assert not (tmp_path / "target").exists()


def test_a_folder_with_something_in_it_is_left_alone(bundle, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("mine")
    assert install(bundle, tmp_path / "target", "--force").returncode == 2
    assert os.listdir(tmp_path / "target") == ["mine"]


def path_of(folder, cwd, **env):
    """PYTHONPATH of a shell that stands in `cwd` and has sourced the wrapper."""
    text = (HOST / "wrappers" / "environment").read_text().replace("@FOLDER@", str(folder))
    done = subprocess.run(
        ["sh", "-c", f'{text}\nprintf %s "$PYTHONPATH"'],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split(":")


def test_a_checkout_is_run_and_not_the_bundle_s_copy_of_it(tmp_path):
    bundled = str(tmp_path / "site-packages")
    assert path_of(tmp_path, tmp_path) == [bundled]
    assert path_of(tmp_path, REPOSITORY) == [str(REPOSITORY), bundled]
    assert path_of(tmp_path, tmp_path, PYTHONPATH="/mine") == ["/mine", bundled]


@pytest.mark.parametrize("target", ["bench-gpu", "gpu-session-1", "gpu-session-2", "gpu-session-3"])
def test_a_gpu_host_s_interpreter_needs_no_environment_of_ours(target):
    done = subprocess.run(
        ["make", "--dry-run", target, "PYTHON=/offline/bin/python"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    script = "bench_gpu" if target == "bench-gpu" else "gpu_session"
    assert f"/offline/bin/python benchmarks/{script}" in done.stdout
    assert f"PYTHONPATH={REPOSITORY}" in done.stdout
    for word in ("pip install", "venv", ".ready"):
        assert word not in done.stdout


def test_a_server_takes_an_attention_backend_that_is_there(tmp_path, monkeypatch):
    from sglang_fp8rl.lab.testing.server import attention_args

    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "flash_attn.py").write_text("from sgl_kernel import flash_ops")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    assert attention_args() == ("--attention-backend=triton",)
    (package / "flash_ops.abi3.so").write_text("")
    assert attention_args() == ()
    (package / "flash_ops.abi3.so").unlink()
    (package / "flash_attn.py").write_text("from elsewhere import kernels")  # newer versions
    assert attention_args() == ()


def test_a_stand_in_takes_the_place_of_no_package_that_is_there(tmp_path):
    names = staging.copy_stand_ins(STAND_INS, tmp_path)
    assert names == ["datasets.py"]
    assert set(names) == {path.name for path in tmp_path.iterdir()}
    (tmp_path / "datasets.py").unlink()
    (tmp_path / "datasets").mkdir()
    with pytest.raises(BundleError, match="unpacked too"):
        staging.copy_stand_ins(STAND_INS, tmp_path)


def test_a_stand_in_says_what_is_missing_when_it_is_asked(tmp_path):
    code = "from datasets import load_dataset; load_dataset('any')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=STAND_INS, capture_output=True, text=True
    )
    assert "ModuleNotFoundError: This bundle has no `datasets`" in done.stderr
