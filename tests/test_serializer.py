"""Stage results on disk: typed, JSON, and trusted only while the payload is what the record says."""

import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from artifacts.cache import FileLocks, stage_key
from artifacts.locks import in_use, locked, nobody_uses
from artifacts.serializer import ArtifactSerializer, verify_once
from artifacts.store import Store
from schemas.config import EvaluateConfig, LoraConfig, ModelConfig, PairsConfig, RenderConfig, SplitConfig
from schemas.errors import ArtifactError, StageError, UserError
from schemas.refs import Ref
from schemas.reports import Paired, PairReport, StageResult
from schemas.requests import EvaluateRequest, IngestRequest, PairsRequest, RenderRequest, SftRequest
from schemas.training import SftConfig


@pytest.fixture
def paired(tmp_path: Path) -> Paired:
    store = Store(tmp_path / "store")
    with store.staging() as folder:
        (folder / "pairs.arrow").write_bytes(b"rows")
        ref = store.add(folder / "pairs.arrow", "pairs", n_rows=1)
    report = PairReport(n_pairs=1, by_rule={"outcome": 1}, by_split={"train": 1}, n_tasks_with_pairs=1)
    return Paired(pairs=ref, report=report)


def test_result_comes_back_as_its_own_type(paired: Paired) -> None:
    blob = ArtifactSerializer().dumps(paired)
    assert json.loads(blob)["kind"] == "Paired"
    assert ArtifactSerializer().loads(blob) == paired


def test_every_kind_of_result_is_registered() -> None:
    kinds = {"Ingested", "ModelReady", "Rendered", "Paired", "Trained", "Evaluated", "Promoted", "RunReport"}
    assert kinds <= set(StageResult.registry)


def test_deleted_payload_fails_the_load(paired: Paired) -> None:
    blob = ArtifactSerializer().dumps(paired)
    Path(paired.pairs.path).unlink()
    with pytest.raises(ArtifactError, match="gone"):
        ArtifactSerializer().loads(blob)


def test_altered_payload_fails_the_load_also_after_it_was_verified(paired: Paired) -> None:
    blob = ArtifactSerializer().dumps(paired)
    ArtifactSerializer().loads(blob)
    path = Path(paired.pairs.path)
    times = path.stat()
    path.write_bytes(b"ROWS")  # of the same length
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # and of the same age
    with pytest.raises(ArtifactError, match="altered"):
        ArtifactSerializer().loads(blob)


def test_verified_payload_is_not_read_again(paired: Paired, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_once(paired.pairs)
    monkeypatch.setattr("artifacts.serializer.verify", lambda ref: pytest.fail("read again"))
    verify_once(paired.pairs)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (UserError("no pair", where="pairs", fix="more runs"), UserError, "pairs: no pair (more runs)"),
        (ValueError("diverged"), StageError, "ValueError: diverged"),
        (KeyError("a", "b"), StageError, "KeyError: ('a', 'b')"),
    ],
)
def test_failure_crosses_with_its_reason(error: Exception, kind: type[Exception], text: str) -> None:
    back = ArtifactSerializer().loads(ArtifactSerializer().dumps(error))
    assert type(back) is kind
    assert str(back) == text


@pytest.mark.parametrize("value", [None, 3, {"a": 1}, [1], Path("x")])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="must return a StageResult"):
        ArtifactSerializer().dumps(value)


def test_record_of_another_shape_fails_the_load(paired: Paired) -> None:
    record = json.loads(ArtifactSerializer().dumps(paired))
    record["data"]["report"]["n_pears"] = 1
    with pytest.raises(ValidationError):
        ArtifactSerializer().loads(json.dumps(record).encode())
    with pytest.raises(KeyError, match="Unknown"):
        ArtifactSerializer().loads(json.dumps({"kind": "Unknown", "data": {}}).encode())
    with pytest.raises(KeyError, match="kind"):
        ArtifactSerializer().loads(json.dumps({"data": {}}).encode())


def ref(digit: str, path: str = "/a") -> Ref:
    return Ref(kind="branches", path=path, sha256=digit * 64, n_bytes=1)


def test_key_depends_on_content_and_version_not_on_places() -> None:
    def key(version: int = 1, store: str = "/s", path: str = "/a", digit: str = "1", seed: int = 0) -> str:
        request = PairsRequest(
            store=store, branches=ref(digit, path), trajectories=ref("2"), pairs=PairsConfig(seed=seed)
        )
        return stage_key("pairs", version, request)

    assert key() == key(store="/t", path="/b")
    assert len({key(), key(version=2), key(digit="3"), key(seed=1)}) == 4
    assert key().startswith("pairs-")


def test_source_is_known_by_its_digest() -> None:
    def request(paths: tuple[str, ...], digest: str) -> IngestRequest:
        return IngestRequest.model_validate({"store": "/s", "source": {"paths": paths}, "source_sha256": digest})

    assert request(("a",), "1").identity() == request(("b",), "1").identity()
    assert request(("a",), "1").identity() != request(("a",), "2").identity()


def test_training_depends_on_how_the_model_is_computed_with_not_on_its_name() -> None:
    def identity(**base: object) -> dict[str, object]:
        return SftRequest(
            store="/s",
            branches=ref("1"),
            model=ref("2"),
            base=ModelConfig.model_validate(base),
            lora=LoraConfig(),
            sft=SftConfig(),
        ).identity()

    assert identity() == identity(name="/models/x", seed=5, chat_template="stock")
    assert identity() != identity(dtype="bfloat16")


def test_template_file_is_known_by_its_digest() -> None:
    def identity(template: str, digest: str) -> dict[str, object]:
        return RenderRequest(
            store="/s",
            trajectories=ref("1"),
            model=ref("2"),
            render=RenderConfig(),
            split=SplitConfig(),
            chat_template=template,
            template_sha256=digest,
        ).identity()

    assert identity("a.jinja", "1") == identity("b.jinja", "1")
    assert identity("a.jinja", "1") != identity("a.jinja", "2")
    assert identity("auto", "") != identity("stock", "")


def test_requests_cross_processes_as_json(paired: Paired) -> None:
    request = EvaluateRequest(
        store="/s",
        branches=ref("1"),
        pairs=paired,
        model=ref("2"),
        base=ModelConfig(),
        adapters={"sft": ref("3")},
        evaluate=EvaluateConfig(),
    )
    assert EvaluateRequest.model_validate(request.model_dump(mode="json")) == request


def test_stage_lock_has_one_holder_and_falls_with_its_process(tmp_path: Path) -> None:
    locks, others = FileLocks(tmp_path), FileLocks(tmp_path)
    assert locks.acquire_lock("k", "me")
    assert not others.acquire_lock("k", "you", acquire_timeout=0)
    assert others.is_locked("k")
    assert others.acquire_lock("other", "you", acquire_timeout=0)
    assert not others.wait_for_lock("k", timeout=0)
    with pytest.raises(ValueError, match="does not hold"):
        others.release_lock("k", "you")
    if (child := os.fork()) == 0:
        FileLocks(tmp_path).acquire_lock("orphan", "child")
        os._exit(1)
    os.waitpid(child, 0)
    assert others.acquire_lock("orphan", "you", acquire_timeout=0)
    locks.release_lock("k", "me")
    assert others.acquire_lock("k", "you", acquire_timeout=0)


def test_store_in_use_is_seen_and_shared(tmp_path: Path) -> None:
    with in_use(tmp_path), in_use(tmp_path), nobody_uses(tmp_path) as free:
        assert not free
    with nobody_uses(tmp_path) as free, locked(tmp_path / "in-use.lock", shared=True) as shared:
        assert free
        assert not shared
