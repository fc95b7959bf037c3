"""Requests to object stores: counted as the providers bill them, and priced by tables that users can change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.cli.main import main
from keepstep.plan.cluster import GIB, RequestPrices, read_profiles
from keepstep.plan.requests import (
    BLOCKS_MIB,
    MIB,
    copied_data,
    find_prices,
    metrics_lines,
    save_requests,
    shuffled_data,
)

TIERS = ("azure-blob-hot", "azure-blob-cool", "s3-standard", "gcs-standard")
PLAN = ["plan", "model=mpt-125m", "data.path=/x", "max_duration=1000ba", "checkpoint.interval=100ba", "--cluster"]
PLAN += ["azure-nd-h100-v5:1"]


def test_upload_counts_blocks_and_their_list() -> None:
    # Microsoft's own example: 1,000 blobs of 5 GiB in blocks of 8 MiB are 641,000 writes, $3.53 in the hot tier.
    found = save_requests(1000 * 5 * GIB, 1000, 8 * MIB, upload_requests=1)
    part_files, manifest_marker_latest = 1000, 3
    assert found.writes - part_files - manifest_marker_latest == 641_000
    hot = read_profiles().requests["azure-blob-hot"]
    assert 641_000 * hot.write / 10_000 == pytest.approx(3.53, abs=0.01)


def test_save_of_uneven_size_counts_the_last_block() -> None:
    assert save_requests(2 * (8 * MIB + 1), 2, 8 * MIB, 1).writes == 2 * (2 + 1) + 2 + 3
    assert save_requests(1, 8, 8 * MIB, 2).writes == 8 * (1 + 2) + 8 + 3


def test_larger_blocks_mean_fewer_reads_but_more_bytes_for_shuffled_rows() -> None:
    copied = [copied_data(100 * GIB, 2, mib * MIB) for mib in BLOCKS_MIB]
    shuffled = [shuffled_data(10_000, 4096, mib * MIB) for mib in BLOCKS_MIB]
    assert [each.reads for each in copied] == [2 * 100 * 1024 // mib for mib in BLOCKS_MIB]
    assert {each.read_bytes for each in copied} == {200 * GIB}
    assert [each.read_bytes for each in shuffled] == [10_000 * mib * MIB for mib in BLOCKS_MIB]
    assert {each.reads for each in shuffled} == {10_000}


def test_cool_tier_charges_for_retrieval() -> None:
    prices = RequestPrices("mine", write=1.0, read=2.0, list=3.0, retrieval=0.5)
    found = copied_data(GIB, 1, GIB)
    assert found.cost(prices) == pytest.approx((2.0 + 3.0) / 10_000 + 0.5)


@pytest.mark.parametrize("name", TIERS)
def test_shipped_prices_have_a_date_and_a_source(name: str) -> None:
    prices = read_profiles().requests[name]
    assert prices.as_of
    assert "." in prices.source
    assert min(prices.write, prices.read, prices.list, prices.other) > 0


def test_metrics_query_names_billed_metrics() -> None:
    azure = "\n".join(metrics_lines(read_profiles().requests["azure-blob-hot"]))
    assert "az monitor metrics list --resource /subscriptions/" in azure
    assert all(word in azure for word in ("Transactions", "Egress", "ApiName", "blobServices/default"))
    aws = "\n".join(metrics_lines(read_profiles().requests["s3-standard"]))
    assert all(word in aws for word in ("AWS/S3", "AllRequests", "BytesDownloaded", "FilterId"))


def test_plan_prices_requests_with_the_users_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("requests: {mine: {write: 1.0, read: 0.5, list: 1.0, egress: 0.1}}\n")
    assert main([*PLAN, "--profiles", str(mine), "--price", "mine", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["requests"]
    assert values["saves"] == 10
    row = values["by_block"][-1]
    assert row["save"]["cost"] == pytest.approx((row["save"]["writes"] + 0.5 * row["save"]["reads"] + 1) / 10_000)
    assert main([*PLAN, "--profiles", str(mine), "--price", "mine"]) == 0
    text = capsys.readouterr().out
    assert "requests  of the whole run on mine (prices: yours)" in text
    assert "egress of the copied data" in text


@pytest.mark.parametrize(
    ("folder", "expected"), [("s3://b/x", "s3-standard"), ("az://c/x", "azure-blob-hot"), ("gs://b/x", "gcs-standard")]
)
def test_plan_knows_the_store_of_the_checkpoints(
    folder: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, f"checkpoint.folder={folder}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"]["prices"]["name"] == expected


def test_plan_on_folders_counts_no_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--json"]) == 0
    assert "requests" not in json.loads(capsys.readouterr().out)
    assert find_prices(None, read_profiles()) is None


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("", ["--price", "azure-blob"], "did you mean azure-blob-hot"),
        ("requests: {mine: {write: 1}}", ["--price", "mine"], "lacks read, list"),
        ("requests: {mine: {write: -1, read: 1, list: 1}}", ["--price", "mine"], "must be 0 or more"),
        ("requests: {mine: {write: a, read: 1, list: 1}}", ["--price", "mine"], "must be a number"),
    ],
)
def test_wrong_prices_are_refused(
    text: str, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text or "{}")
    assert main([*PLAN, "--profiles", str(file), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_bench_storage_prices_a_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "storage", "--data", f"a={tmp_path}", "--checkpoints", f"a={tmp_path}", "--size", "4MiB"]
    assert main([*words, "--writers", "2", "--price", "azure-blob-hot"]) == 0
    text = capsys.readouterr().out
    assert f"| mpt-30b | 32 | {336 * 1024 // 32 + 2 * 1 + 2 + 3:,} |" in text
    assert "az monitor metrics list" in text
