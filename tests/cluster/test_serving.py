"""Searches over HTTP beside the library's own: answers, refusals, batches, figures, and the end of a server."""

import asyncio
import inspect
import io
import json
import pickle
import re
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="needs the extra serve; `make test-cluster` installs it")
import httpx

from memhier.ann import ZoomIndex
from memhier.ann.serving import ServingOptions
from memhier.ann.serving.app import build_app
from memhier.ann.serving.service import SearchService

COUNT, DIMENSION = 2000, 12
BINARY = "application/octet-stream"
ALSO_BINARY = {"Content-Type": BINARY, "Accept": BINARY}
RANDOM = np.random.default_rng(0)
VECTORS = RANDOM.normal(size=(COUNT, DIMENSION)).astype(np.float32)
QUERIES = RANDOM.normal(size=(200, DIMENSION)).astype(np.float32)
DOCUMENTS = [
    {"text": f"number {row} ü", "raw": b"\xff" + bytes([row % 256]), "big": 10**30 + row} for row in range(COUNT)
]
ATTRIBUTES = {
    "n": range(COUNT), "lang": [("en", "de", None)[row % 3] for row in range(COUNT)],
    "share": [row / 7 if row % 2 else None for row in range(COUNT)],
    "when": [np.datetime64("2020-01-01", "us") + row if row % 5 else None for row in range(COUNT)],
    "tags": [["a", "b"][: row % 3] for row in range(COUNT)],
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "index"
    ZoomIndex.build(path, VECTORS, attributes=ATTRIBUTES, documents=DOCUMENTS, dram="12MiB").close()
    return path


@pytest.fixture(scope="module")
def index(place):
    with ZoomIndex.open(place) as opened:
        yield opened


def test_a_server_follows_the_commits_of_a_writer(tmp_path):
    """It keeps its commit where the newest cannot be read, says so, and goes on after that."""
    path = tmp_path / "index"
    with ZoomIndex.build(path, VECTORS[:500], dram="4MiB", grow_to=1000) as writer, ZoomIndex.open(path) as reader:

        async def conversation(client, service):
            async def until(told):
                for _ in range(1000):
                    if told(health := (await client.get("/health")).json()):
                        return health
                    await asyncio.sleep(0.02)
                raise AssertionError(health)

            assert await until(lambda health: health["vectors"] == 500)
            writer.add(VECTORS[500:600])
            writer.commit()
            await until(lambda health: health["vectors"] == 600)
            assert (await client.post("/search", json={"vectors": VECTORS[550].tolist(), "k": 1})).json()["ids"] == [
                550
            ]
            (path / "catalog.sum").rename(path / "away")
            assert "catalog" in (await until(lambda health: "refresh_failure" in health))["refresh_failure"]
            assert (await client.post("/search", json={"vectors": VECTORS[550].tolist(), "k": 1})).json()["ids"] == [
                550
            ]
            (path / "away").rename(path / "catalog.sum")
            assert (await until(lambda health: "refresh_failure" not in health))["vectors"] == 600
            service.close()

        talk(reader, conversation, refresh_seconds=0.01)
    for wrong in (0, -1, "x", float("nan")):
        with pytest.raises((ValueError, TypeError), match="refresh_seconds"):
            ServingOptions(refresh_seconds=wrong)


class Slow:
    """An index whose searches wait until they are let go; it notes the size and the options of each."""

    def __init__(self, index):
        self.index, self.calls, self.go = index, [], threading.Event()
        self.dimension, self.metric, self.fields = index.dimension, index.metric, index.fields
        self.at_once = self.most_at_once = 0
        self._counting = threading.Lock()

    def __len__(self):
        return len(self.index)

    def stats(self):
        return self.index.stats()

    def search(self, queries, k, *, recall=None, where=None):
        self.calls.append((len(queries), k, where))
        with self._counting:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.go.wait(60)
        with self._counting:
            self.at_once -= 1
        return self.index.search(queries, k, recall=recall, where=where)


def talk(index, conversation, **options):
    """Hold a conversation with a service: an async function of a client and the service. Return its result."""

    async def held():
        service = SearchService(index, ServingOptions(**options))
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as client:
            return await conversation(client, service)

    return asyncio.run(held())


def ask(index, content=None, headers=None, params=None, /, **options):
    """Return the answer to one request."""
    sent = {"json": content} if isinstance(content, dict) else {"content": content}

    async def once(client, service):
        return await client.post("/search", headers=headers, params=params, **sent)

    return talk(index, once, **options)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def same(answer, found):
    """Whether an answer holds the neighbours that the library found."""
    assert answer.status_code == 200, answer.text
    got = answer.json()
    assert got["ids"] == found.ids.tolist()
    distances = np.array(got["distances"], np.float32)  # null becomes NaN
    np.testing.assert_array_equal(np.nan_to_num(distances, nan=np.inf), found.distances)
    return got


@pytest.mark.parametrize(
    "options",
    [
        {}, {"k": 1}, {"k": 7, "recall": 0.9}, {"recall": 1}, {"k": 5, "where": "n < 300 and lang == 'en'"},
        {"k": 4, "where": "n < 2"}, {"k": 3, "candidates": 50, "nprobe": 4}, {"k": 3, "candidates": 50, "max_reads": 2},
        {"k": 30, "radius": 8.5}, {"k": 3, "deadline_ms": 1e6}, {"k": 4, "allow": [7, 3, 500, 9999]},
        {"k": 3, "deny": [7], "where": "n < 40"}, {"k": 3, "allow": [5]},
        {"k": 4, "deny": [7, None, -1], "where": "n >= share and not n < share"},
    ],
    ids=str,
)  # fmt: skip
def test_answers_are_those_of_the_library(index, options):
    for queries in (QUERIES[:9], QUERIES[0], QUERIES[:0]):
        found = index.search(queries, **{"k": 10, **options})
        if len(queries):  # JSON cannot tell how wide no vectors are
            same(ask(index, {"vectors": queries.tolist(), **options}), found)
        raw = ask(index, npy(queries), ALSO_BINARY, options)
        assert raw.status_code == 200, raw.text
        pairs = np.load(io.BytesIO(raw.content))
        np.testing.assert_array_equal(pairs["id"], found.ids)
        np.testing.assert_array_equal(pairs["distance"], found.distances)


@pytest.mark.parametrize("dtype", ["float16", "float64", ">f4", "int8", "uint8", "int64"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_any_real_dtype_and_order_of_a_binary_body_is_searched(index, dtype, order):
    queries = np.asarray(QUERIES[:5] * 10, dtype=dtype, order=order)
    found = index.search(queries.astype(np.float32), 3)
    same(ask(index, npy(queries), {"Content-Type": BINARY}, {"k": 3}), found)


def test_rows_hold_every_kind_of_field(index):
    found = index.search(QUERIES[:20], 9, fields=True)
    for fields in (True, ["when", "raw", "big"]):
        got = same(ask(index, {"vectors": QUERIES[:20].tolist(), "k": 9, "fields": fields}), found)
        for query, rows in enumerate(got["rows"]):
            for rank, row in enumerate(rows):
                number = int(found.ids[query, rank])
                assert row["id"] == number
                assert row["big"] == 10**30 + number
                assert (row["when"] is None) == (number % 5 == 0)
                if fields is True:
                    assert row["text"] == f"number {number} ü"
                    assert row["lang"] == ("en", "de", None)[number % 3]
                    assert row["share"] == (number / 7 if number % 2 else None)
                    assert row["tags"] == ["a", "b"][: number % 3]
    asked = ask(index, npy(QUERIES[:2]), {"Content-Type": BINARY}, {"k": 2, "fields": ["n", "lang"]})
    assert [sorted(row) for rows in asked.json()["rows"] for row in rows] == [["distance", "id", "lang", "n"]] * 4
    assert "text" in ask(index, npy(QUERIES[:2]), {"Content-Type": BINARY}, {"fields": "true"}).json()["rows"][0][0]


def test_text_ids_and_their_absence(tmp_path):
    names = [f"ä{row}" for row in range(4)]
    with ZoomIndex.build(tmp_path / "named", VECTORS[:4], ids=names, dram="4MiB") as index:
        got = ask(index, {"vectors": VECTORS[2].tolist(), "k": 6}).json()
        assert got["ids"][0] == "ä2"
        assert (got["ids"][4:], got["distances"][4:]) == ([None, None], [None, None])
        pairs = np.load(io.BytesIO(ask(index, npy(VECTORS[2]), ALSO_BINARY, {"k": 6}).content))
        assert pairs["id"].tolist() == [*got["ids"][:4], "", ""]


GOOD = QUERIES[:2].tolist()
WRONG = [
    ({"vectors": [[1.0, 2.0]]}, 422, r"queries has shape \(1, 2\): expected \[q, 12\]"),
    ({"vectors": [GOOD[0], GOOD[0][:-1]]}, 422, "vectors|queries|shape"),
    ({"vectors": [[float("nan")] * 12]}, 422, "queries row 0 holds NaN"),
    ({"vectors": [[1e39] * 12]}, 422, "queries row 0 holds NaN or infinity"),
    ({"vectors": [["1"] * 12]}, 422, "queries"),
    ({"vectors": None}, 422, "queries"),
    ({"vectors": {"a": 1}}, 422, "queries"),
    ({"vectors": "all"}, 422, "queries"),
    ({"vectors": [[[1.0] * 12]]}, 422, "shape"),
    ({"k": 3}, 422, "vectors: field required"),
    ({"vectors": GOOD, "k": 0}, 422, "k=.0.: .*greater than or equal to 1"),
    ({"vectors": GOOD, "k": "5"}, 422, "k=.5.: .*valid integer"),
    ({"vectors": GOOD, "k": True}, 422, "k"),
    ({"vectors": GOOD, "k": 10**30}, 422, "k"),
    ({"vectors": GOOD, "k": 1001}, 422, "k=1001: expected at most 1000"),
    ({"vectors": GOOD, "recall": 1.5}, 422, "recall=1.5: expected a number above 0 and at most 1"),
    ({"vectors": GOOD, "recall": float("nan")}, 422, "recall=nan"),
    ({"vectors": GOOD, "recall": 0.9, "nprobe": 3}, 422, "expected either a recall"),
    ({"vectors": GOOD, "where": "n <"}, 422, "where|n <"),
    ({"vectors": GOOD, "where": "m < 3"}, 422, "m"),
    ({"vectors": GOOD, "where": 3}, 422, "where"),
    ({"vectors": GOOD, "allow": ["x"]}, 422, "allow"),
    ({"vectors": GOOD, "deny": [1.5]}, 422, "deny"),
    ({"vectors": GOOD, "deny": 3}, 422, "deny"),
    ({"vectors": GOOD, "deny": [1, "x"]}, 422, "deny"),
    ({"vectors": GOOD, "fields": ["author"]}, 422, "author.*expected"),
    ({"vectors": GOOD, "fields": "text"}, 422, "fields"),
    ({"vectors": GOOD, "partial": True}, 422, "partial: ZoomIndex has no such option"),
    ({"vectors": GOOD, "limit": 3}, 422, "limit: expected one of vectors, k, recall"),
    ({"vectors": GOOD, "max_reads": 0}, 422, "max_reads=0"),
    ({"vectors": GOOD, "deadline_ms": 0}, 422, "deadline_ms=0"),
    ({"vectors": [GOOD[0]] * 1025, "k": 1}, 413, "vectors has 1025 rows: expected at most 1024"),
    ({"vectors": [GOOD[0]] * 100, "k": 900}, 413, "100 vectors with k=900: expected at most 65536"),
]


@pytest.mark.parametrize(("content", "status", "words"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_value_is_refused_in_words(index, content, status, words):
    answer = ask(index, json.dumps(content), {"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert re.search(words, answer.json()["detail"]), answer.text


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"", "application/json", 400), (b"{", "application/json", 400), (b"\xff\xfe", "application/json", 400),
        (b"[1, 2]", "application/json", 422), (b"[" * 100_000, "application/json", 400), (b"", BINARY, 400),
        (npy(QUERIES)[:-1], BINARY, 400), (npy(QUERIES)[:60], BINARY, 400), (b"PK\x03\x04", BINARY, 400),
        (npy(np.array([[1, "x"]], object)), BINARY, 400), (npy(QUERIES[:, :5]), BINARY, 422),
        (npy(np.full((1, DIMENSION), np.nan)), BINARY, 422), (npy(np.full((1, DIMENSION), "1")), BINARY, 422),
        (npy(QUERIES.astype(complex)), BINARY, 422), (npy(QUERIES > 0), BINARY, 422), (npy(np.float32(1)), BINARY, 422),
        (npy(QUERIES), "text/csv", 415),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_body_of_another_form_is_refused(index, content, kind, status):
    answer = ask(index, content, {"Content-Type": kind})
    assert answer.status_code == status, answer.text
    assert answer.json()["detail"]


def test_options_of_a_binary_body_are_checked(index):
    for params in ({"k": "x"}, {"k": 1001}, {"recall": 2}, {"limit": 3}, {"fields": "author"}, {"vectors": "[[1]]"}):
        answer = ask(index, npy(QUERIES), {"Content-Type": BINARY}, params)
        assert answer.status_code == (200 if "vectors" in params else 422), (params, answer.text)
    answer = ask(index, npy(QUERIES), ALSO_BINARY, {"fields": "n"})
    assert (answer.status_code, "binary holds none" in answer.text) == (422, True)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_bodies_are_refused_and_never_fail(index, data):
    kind = data.draw(st.sampled_from([BINARY, "application/json"]))
    whole = npy(QUERIES[:3]) if kind == BINARY else json.dumps({"vectors": GOOD, "k": 3, "where": "n < 5"}).encode()
    body = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255))
    answer = ask(index, bytes(body[: data.draw(st.integers(1, len(body)))]), {"Content-Type": kind})
    assert answer.status_code in (200, 400, 413, 422), answer.text


def test_a_token_is_asked_for_by_searches_and_figures_alone(index):
    async def held(client, service):
        body = {"vectors": GOOD, "k": 1}
        sent = [
            None,
            "Bearer another one",
            "Bearer",
            "secret word",
            "Basic secret word",
            "Bearer secret wor\xfc".encode("latin-1"),
        ]
        for header in sent:
            headers = {} if header is None else {"Authorization": header}
            for answer in (await client.post("/search", json=body, headers=headers),
                           await client.get("/metrics", headers=headers)):  # fmt: skip
                assert answer.status_code == 401, header
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        for header in ("Bearer secret word", "bearer  secret word"):
            assert (await client.post("/search", json=body, headers={"Authorization": header})).status_code == 200
        for page in ("/health", "/openapi.json", "/docs"):
            assert (await client.get(page)).status_code == 200
        assert service.metrics.text().count(b'memhier_errors_total{kind="token"} 6.0') == 1

    talk(index, held, token="secret word")
    with pytest.raises(ValueError, match="token has 3 characters"):
        ServingOptions(token="abc")


def test_no_form_of_the_options_tells_the_token():
    options = ServingOptions(token="hush, hush")
    assert b"hush" not in repr(options).encode() + pickle.dumps(options)
    assert pickle.loads(pickle.dumps(options)).knows("hush, hush")


def test_a_body_beyond_the_limit_is_refused_with_and_without_its_length(index):
    sent = 0

    async def chunks():
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b" " * 1000

    async def held(client, service):
        for content in (b" " * 3001, chunks()):
            answer = await client.post("/search", content=content, headers={"Content-Type": "application/json"})
            assert (answer.status_code, "expected at most 3,000" in answer.text) == (413, True)

    talk(index, held, max_body=3000)
    with pytest.raises(ValueError, match="max_body=0"):
        ServingOptions(max_body=0)


def test_more_requests_than_allowed_are_told_to_come_back(index):
    slow = Slow(index)

    async def held(client, service):
        asked = [asyncio.create_task(client.post("/search", json={"vectors": GOOD})) for _ in range(5)]
        while not any(each.done() for each in asked):
            await asyncio.sleep(0.01)
        slow.go.set()
        answers = await asyncio.gather(*asked)
        late = [each for each in answers if each.status_code == 503]
        assert sorted(each.status_code for each in answers) == [200, 200, 200, 503, 503]
        assert all(each.headers["Retry-After"] == "1" for each in late)
        assert (await client.post("/search", json={"vectors": GOOD})).status_code == 200
        assert b'memhier_errors_total{kind="busy"} 2.0' in service.metrics.text()

    talk(slow, held, max_requests=3)


def test_requests_that_wait_are_joined_where_options_are_equal(index):
    slow = Slow(index)
    wanted = [{"k": 2 + number % 2, **({"where": "n < 900"} if number % 3 == 0 else {})} for number in range(24)]

    async def held(client, service):
        first = asyncio.create_task(client.post("/search", json={"vectors": GOOD[:1], "k": 9}))
        while not slow.calls:
            await asyncio.sleep(0.01)
        assert slow.calls == [(1, 9, None)]  # an idle server waits for nothing
        asked = [
            asyncio.create_task(client.post("/search", json={"vectors": QUERIES[n : n + 1 + n % 3].tolist(), **each}))
            for n, each in enumerate(wanted)
        ]
        while service.metrics.text().count(b"memhier_active_requests 25.0") == 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        slow.go.set()
        return [await first, *await asyncio.gather(*asked)]

    answers = talk(slow, held, searches=1)
    for number, (options, answer) in enumerate(zip(wanted, answers[1:], strict=True)):
        same(answer, index.search(QUERIES[number : number + 1 + number % 3], **options))
    rows = dict.fromkeys([(2, None), (3, None), (2, "n < 900"), (3, "n < 900")], 0)
    for number, options in enumerate(wanted):
        rows[options["k"], options.get("where")] += 1 + number % 3
    assert sorted(slow.calls[1:], key=str) == sorted(((count, *key) for key, count in rows.items()), key=str)


def test_searches_keep_their_sizes_and_their_number(index):
    slow = Slow(index)

    async def held(client, service):
        asked = [
            asyncio.create_task(client.post("/search", json={"vectors": QUERIES[: 1 + n % 7].tolist(), "k": 1 + n % 2}))
            for n in range(40)
        ]
        asked.append(asyncio.create_task(client.post("/search", json={"vectors": QUERIES[:50].tolist(), "k": 1})))
        while len(slow.calls) < 3:
            await asyncio.sleep(0.01)
        slow.go.set()
        return await asyncio.gather(*asked)

    assert {answer.status_code for answer in talk(slow, held, searches=3, max_batch=12)} == {200}
    assert slow.most_at_once == 3
    assert {rows for rows, _, _ in slow.calls if rows > 12} <= {50}
    assert sum(rows for rows, _, _ in slow.calls) == sum(1 + n % 7 for n in range(40)) + 50


def test_an_error_of_one_request_and_a_client_that_leaves_hurt_no_other(index):
    slow = Slow(index)

    async def held(client, service):
        first = asyncio.create_task(client.post("/search", json={"vectors": GOOD}))
        while not slow.calls:
            await asyncio.sleep(0.01)
        good = [asyncio.create_task(client.post("/search", json={"vectors": [row]})) for row in GOOD * 3]
        bad = [asyncio.create_task(client.post("/search", json={"vectors": GOOD, "where": "m < 3"})) for _ in range(2)]
        gone = [asyncio.create_task(client.post("/search", json={"vectors": GOOD})) for _ in range(3)]
        while b"memhier_active_requests 12.0" not in service.metrics.text():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        for each in gone:
            each.cancel()
        slow.go.set()
        await asyncio.wait(gone)
        for row, answer in zip(GOOD * 3, await asyncio.gather(*good), strict=True):
            same(answer, index.search([row], 10))
        assert {answer.status_code for answer in await asyncio.gather(*bad)} == {422}
        assert (await first).status_code == 200
        assert b"memhier_active_requests 0.0" in service.metrics.text()
        assert b'memhier_errors_total{kind="client left"} 3.0' in service.metrics.text()

    talk(slow, held, searches=1)
    assert (6, 10, None) in slow.calls  # those that left are not searched


def test_a_drain_waits_for_what_runs_and_refuses_what_comes(index):
    slow = Slow(index)

    async def held(client, service):
        running = asyncio.create_task(client.post("/search", json={"vectors": GOOD}))
        while not slow.calls:
            await asyncio.sleep(0.01)
        assert (await client.get("/health")).status_code == 200
        drained = asyncio.create_task(service.drain())
        await asyncio.sleep(0.05)
        assert not drained.done()
        late, health = await client.post("/search", json={"vectors": GOOD}), await client.get("/health")
        assert (late.status_code, late.headers["Retry-After"], health.status_code) == (503, "1", 503)
        slow.go.set()
        await drained
        same(await running, index.search(GOOD, 10))

    talk(slow, held)


def test_figures_count_requests_errors_batches_and_pages(index):
    async def held(client, service):
        for number in range(1, 6):
            await client.post("/search", json={"vectors": QUERIES[:number].tolist()})
        await client.post("/search", json={"vectors": GOOD, "k": 0})
        await client.post("/search", content=b"{", headers={"Content-Type": "application/json"})
        return (await client.get("/metrics")).text

    figures = dict(re.findall(r"^(memhier\S*) (\S+)$", talk(index, held), re.MULTILINE))
    pages = sum(index.search(QUERIES[:number], 10).stats["pages"] for number in range(1, 6))
    expected = {
        'memhier_requests_total{status="200"}': 5, 'memhier_requests_total{status="422"}': 1,
        'memhier_requests_total{status="400"}': 1, 'memhier_errors_total{kind="value"}': 1,
        'memhier_errors_total{kind="format"}': 1, "memhier_request_seconds_count": 7,
        "memhier_batch_requests_count": 5, "memhier_batch_vectors_sum": 15, "memhier_pages_read_total": pages,
    }  # fmt: skip
    assert {name: float(figures[name]) for name in expected} == expected


def test_the_description_names_every_option_and_limit(index):
    async def held(client, service):
        return (await client.get("/openapi.json")).json()

    page = talk(index, held, max_k=77, max_vectors=55, token="secret word")["paths"]["/search"]["post"]
    schema = page["requestBody"]["content"]["application/json"]["schema"]
    options = {*inspect.signature(ZoomIndex.search).parameters} - {"self", "queries"} | {"vectors", "partial"}
    assert {*schema["properties"]} == options
    assert {each["name"] for each in page["parameters"]} == options - {"vectors"}
    assert all(each["description"] for each in schema["properties"].values())
    assert schema["properties"]["k"]["maximum"] == 77
    assert "55 vectors" in schema["properties"]["vectors"]["description"]
    assert {*page["responses"]} == {"200", "400", "401", "413", "415", "422", "503"}
    same(ask(index, schema["example"]), index.search(schema["example"]["vectors"], 10, recall=0.95))
