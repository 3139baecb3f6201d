// Tests of the reader's core without Python: its plan, its ring, its fence, its checksums, and a batch read from a
// file.
#include <unistd.h>

#include <array>
#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "io/context.hpp"
#include "io/crc32c.hpp"
#include "io/fence.hpp"
#include "io/plan.hpp"
#include "io/ring.hpp"

namespace memhier {
namespace {

void check(bool holds, const char* claim) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", claim);
  std::exit(1);
}

// Every page of every request is read once, neighbours together, and each run names the requests that touch it.
void test_plan() {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    const std::uint64_t length = 1 + random() % (round % 2 == 0 ? 300 : 5 * kPageBytes);
    const std::uint64_t span = (1 + random() % 200) * kPageBytes;
    std::vector<Request> requests;
    std::set<std::pair<std::uint32_t, std::uint64_t>> wanted;
    for (std::uint32_t row = 0; row < 1 + random() % 300; ++row) {
      requests.push_back({random() % span, static_cast<std::uint32_t>(random() % 3), row});
      const Request& one = requests.back();
      for (auto page = one.first_page(); page <= one.last_page(length); ++page) wanted.insert({one.file, page});
    }
    const std::size_t most = round % 4 < 2 ? 16 : 32;
    Plan plan(length, most);
    Plan::sort(requests);
    plan.start(requests);
    std::map<std::pair<std::uint32_t, std::uint64_t>, int> read;
    std::pair<std::uint32_t, std::uint64_t> last{0, 0};
    while (!plan.finished()) {
      const Run run = plan.next();
      check(run.pages >= 1 && run.pages <= most, "a run has a page, and no more than it may");
      check(std::pair(run.file, run.page + 1) > last, "runs ascend");
      last = {run.file, run.page + run.pages};
      for (std::uint64_t page = run.page; page < run.page + run.pages; ++page) ++read[{run.file, page}];
      for (std::uint32_t i = 0; i < requests.size(); ++i) {
        const Request& one = requests[i];
        const bool touches =
            one.file == run.file && one.first_page() < run.page + run.pages && one.last_page(length) >= run.page;
        check(!touches || (i >= run.first_request && i < run.stop_request), "a run names the requests that touch it");
      }
    }
    check(read.size() == wanted.size(), "no page is read that nothing wants");
    for (const auto& page : wanted) check(read[page] == 1, "each page is read once");
  }
}

// Elements keep their counters as the ring grows, also where these wrap around.
void test_ring() {
  for (const std::uint32_t first : {0u, 5u, 0xfffffffeu}) {
    Ring<std::uint32_t> ring(4);
    const std::uint32_t last = first + 4;
    for (std::uint32_t counter = first; counter != last; ++counter) ring[counter] = counter * 3;
    ring.grow(first, last);
    check(ring.size() == 8, "growing doubles a ring");
    for (std::uint32_t counter = last; counter != first + 8; ++counter) ring[counter] = counter * 3;
    for (std::uint32_t counter = first; counter != first + 8; ++counter)
      check(ring[counter] == counter * 3, "a ring keeps its elements");
  }
}

// Two processors that each write, pass a fence and read cannot both miss the other's write.
void test_fence() {
  constexpr int kRounds = 500;
  std::array<std::atomic<int>, 2> written{};
  std::array<int, 2> seen{};
  std::barrier together(2);
  const auto run = [&](std::size_t self) {
    for (int round = 0; round < kRounds; ++round) {
      together.arrive_and_wait();
      written[self].store(1, std::memory_order_relaxed);
      fence();
      seen[self] = written[1 - self].load(std::memory_order_relaxed);
      together.arrive_and_wait();
      if (self == 0) check(seen[0] + seen[1] > 0, "a fence orders a write before a read");
      together.arrive_and_wait();
      written[self].store(0, std::memory_order_relaxed);
    }
  };
  std::thread other(run, 1);
  run(0);
  other.join();
}

// One polynomial, one bit at a time.
std::uint32_t crc_by_bits(const std::byte* data, std::size_t size) {
  std::uint32_t crc = 0xffffffff;
  for (std::size_t i = 0; i < size; ++i) {
    crc ^= static_cast<std::uint32_t>(data[i]);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? (crc >> 1) ^ 0x82F63B78 : crc >> 1;
  }
  return ~crc;
}

void test_checksums() {
  constexpr std::string_view kNine = "123456789";
  check(crc32c(kNine.data(), kNine.size()) == 0xe3069283, "the checksum that the standard gives");
  std::mt19937_64 random(3);
  std::vector<std::byte> data(3 * kPageBytes + 100);
  for (auto& each : data) each = static_cast<std::byte>(random());
  for (int round = 0; round < 200; ++round) {
    const std::size_t start = random() % 64, size = random() % (data.size() - 64),
                      cut = size == 0 ? 0 : random() % size;
    const std::byte* at = data.data() + start;
    const std::uint32_t expected = crc_by_bits(at, size);
    check(crc32c(at, size) == expected, "the processor's checksum");
    check(crc32c_by_table(at, size) == expected, "the checksum by table");
    check(crc32c(at + cut, size - cut, crc32c(at, cut)) == expected, "a checksum in pieces");
  }
}

// A file of a few pages, the last one not whole, with its checksums.
struct TestFile {
  static constexpr std::size_t kBytes = 40 * kPageBytes + 1000;
  std::FILE* file = std::tmpfile();
  std::vector<std::byte> bytes = std::vector<std::byte>(41 * kPageBytes);
  std::vector<std::uint32_t> checksums;

  TestFile() {
    std::mt19937_64 random(11);
    for (std::size_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<std::byte>(random());
    check(file != nullptr && std::fwrite(bytes.data(), 1, kBytes, file) == kBytes && std::fflush(file) == 0, "a file");
    for (std::size_t at = 0; at < bytes.size(); at += kPageBytes)
      checksums.push_back(crc32c(bytes.data() + at, kPageBytes));
  }
  ~TestFile() { std::fclose(file); }
  Source source() const { return {::fileno(file), false, false, kBytes, checksums.data()}; }
};

std::optional<Fault> read_all(const Source& source, const std::vector<std::int64_t>& offsets, std::size_t length,
                              std::vector<std::byte>& out, ReadTally& tally, BufferPool* pool = nullptr) {
  constexpr unsigned kDepth = 8, kRunPages = 32;
  Context context(kDepth, kRunPages, make_thread_engine(make_thread_pool(kDepth), kDepth), nullptr);
  const Source* sources[] = {&source};
  out.assign(offsets.size() * length, std::byte{0});
  const Batch batch{sources, nullptr, 0, offsets.data(), offsets.size(), length, out.data(), nullptr, nullptr, pool};
  for (std::size_t start = 0; start < offsets.size(); start += context.window())
    if (auto fault = context.read_window(batch, start, tally)) return fault;
  return std::nullopt;
}

void test_reads() {
  TestFile file;
  std::mt19937_64 random(5);
  std::vector<std::byte> out;
  for (const std::size_t length : {1ul, 100ul, 4096ul, 10000ul}) {
    std::vector<std::int64_t> offsets(2000);
    for (auto& each : offsets) each = static_cast<std::int64_t>(random() % (TestFile::kBytes - length + 1));
    ReadTally tally;
    check(!read_all(file.source(), offsets, length, out, tally), "a sound file is read");
    for (std::size_t row = 0; row < offsets.size(); ++row)
      check(std::equal(out.begin() + static_cast<std::ptrdiff_t>(row * length),
                       out.begin() + static_cast<std::ptrdiff_t>((row + 1) * length),
                       file.bytes.begin() + static_cast<std::ptrdiff_t>(offsets[row])),
            "each row has its bytes");
    check(tally.pages <= 2 * 41, "each page of a window is read once");
  }
  ReadTally tally;
  file.checksums[17] ^= 1;
  const auto damaged = read_all(file.source(), {0, 17 * kPageBytes + 5, 30 * kPageBytes}, 8, out, tally);
  check(damaged && damaged->kind == Fault::Kind::checksum && damaged->first == 17, "a damaged page is named");
  Source longer = file.source();
  longer.length += kPageBytes;
  longer.checksums = nullptr;
  const auto cut = read_all(longer, {static_cast<std::int64_t>(TestFile::kBytes) + 8}, 8, out, tally);
  check(cut && cut->kind == Fault::Kind::cut_short, "a file that was cut short is found out");
  const auto beyond = read_all(longer, {static_cast<std::int64_t>(longer.length) - 7}, 8, out, tally);
  check(beyond && beyond->kind == Fault::Kind::range && beyond->first == 0, "a range beyond the file is refused");
}

// A page filled with one number.
std::array<std::byte, kPageBytes> page_of(std::uint8_t value) {
  std::array<std::byte, kPageBytes> page;
  page.fill(std::byte{value});
  return page;
}

std::vector<std::byte> held(BufferPool& pool, std::int64_t key) {
  const PageRun run{key, 1};
  std::uint32_t frame = BufferPool::none;
  pool.pin(&run, 1, 1, &frame);
  std::vector<std::byte> found;
  if (frame != BufferPool::none) found.assign(pool.page(frame), pool.page(frame) + kPageBytes);
  pool.unpin(&run, 1, 1, &frame);
  return found;
}

// Pages come back as they entered, no more than there is room for; those of a file that was dropped never.
void test_pool() {
  BufferPool pool(10);
  pool.add_file(3);
  pool.add_file(7);
  const auto key = [](std::int64_t file, std::uint64_t page) { return BufferPool::key_of(file, page); };
  for (std::uint64_t page = 0; page < 100; ++page) {
    pool.put(key(page % 2 == 0 ? 3 : 7, page), page_of(static_cast<std::uint8_t>(page)).data());
    check(pool.size() == std::min<std::size_t>(page + 1, 10), "a pool fills up, and no further");
  }
  std::size_t there = 0;
  for (std::uint64_t page = 0; page < 100; ++page) {
    const auto found = held(pool, key(page % 2 == 0 ? 3 : 7, page));
    there += !found.empty();
    check(found.empty() || found[77] == std::byte{static_cast<std::uint8_t>(page)}, "a page has its bytes");
  }
  check(there == 10 && pool.hits() == 10, "as many pages as it says, each hit counted");
  const PageRun pinned{key(3, 200), 1};
  std::uint32_t frame = BufferPool::none;
  pool.put(pinned.key, page_of(200).data());
  pool.pin(&pinned, 1, 1, &frame);
  pool.drop_file(3);
  for (std::uint64_t page = 300; page < 400; ++page) pool.put(key(7, page), page_of(1).data());
  check(pool.page(frame)[5] == std::byte{200}, "a pinned page stays while its file goes and others come");
  pool.unpin(&pinned, 1, 1, &frame);
  pool.put(key(3, 1), page_of(1).data());
  for (const std::uint64_t page : {1, 200})
    check(held(pool, key(3, page)).empty(), "no page of a dropped file is found");
  pool.set_room(4);
  check(pool.size() == 4, "a pool shrinks");
  pool.set_room(0);
  pool.put(key(7, 1), page_of(1).data());
  check(pool.size() == 0, "a pool without room takes nothing in");
}

// One pass over many pages does not push out those in use.
void test_pool_scan() {
  BufferPool pool(100);
  pool.add_file(0);
  for (int round = 0; round < 4; ++round)
    for (std::int64_t page = 0; page < 60; ++page)
      if (held(pool, page).empty()) pool.put(page, page_of(1).data());
  for (std::int64_t page = 1000; page < 3000; ++page)
    if (held(pool, page).empty()) pool.put(page, page_of(2).data());
  std::size_t there = 0;
  for (std::int64_t page = 0; page < 60; ++page) there += !held(pool, page).empty();
  check(there == 60, "pages in use outlast a scan");
}

// Threads pin, read, put and drop at once; no page ever shows another one's bytes.
void test_pool_threads() {
  BufferPool pool(40);
  for (std::int64_t file = 0; file < 4; ++file) pool.add_file(file);
  std::atomic<bool> wrong = false;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed)
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      for (int step = 0; step < 20000; ++step) {
        const std::int64_t file = random() % 4;
        const std::uint64_t page = random() % 60;
        const auto value = static_cast<std::uint8_t>(file * 60 + static_cast<std::int64_t>(page));
        const auto found = held(pool, BufferPool::key_of(file, page));
        if (!found.empty() && (found.front() != std::byte{value} || found.back() != std::byte{value})) wrong = true;
        if (found.empty()) pool.put(BufferPool::key_of(file, page), page_of(value).data());
        if (seed == 0 && step % 500 == 0) pool.drop_file(file), pool.add_file(file);
        if (seed == 1 && step % 700 == 0) pool.set_room(random() % 40 + 1);
      }
    });
  for (auto& thread : threads) thread.join();
  check(!wrong, "pages keep their bytes among threads");
}

// A read takes pages from the pool, reads the others, and both have the bytes of the file.
void test_reads_with_pool() {
  TestFile file;
  Source source = file.source();
  source.held_as = 5;
  BufferPool pool(16);
  pool.add_file(5);
  std::mt19937_64 random(6);
  std::vector<std::byte> out;
  for (const std::size_t length : {1ul, 100ul, 4096ul, 10000ul}) {
    for (int round = 0; round < 20; ++round) {
      std::vector<std::int64_t> offsets(50);
      for (auto& each : offsets) each = static_cast<std::int64_t>(random() % (TestFile::kBytes - length + 1));
      ReadTally tally;
      check(!read_all(source, offsets, length, out, tally, &pool), "a sound file is read");
      for (std::size_t row = 0; row < offsets.size(); ++row)
        check(std::equal(out.begin() + static_cast<std::ptrdiff_t>(row * length),
                         out.begin() + static_cast<std::ptrdiff_t>((row + 1) * length),
                         file.bytes.begin() + static_cast<std::ptrdiff_t>(offsets[row])),
              "each row has its bytes");
      ReadTally last;
      for (int again = 0; again < 20; ++again) {
        last = {};
        check(!read_all(source, {offsets[0], offsets[0]}, length, out, last, &pool), "a sound file is read");
      }
      check(last.pages == 0, "pages in use are not read again");
    }
  }
  check(pool.size() == 16 && pool.hits() > 0, "the pool is in use");
  BufferPool fresh(16);
  fresh.add_file(5);
  file.checksums[17] ^= 1;
  ReadTally tally;
  const auto damaged = read_all(source, {17 * kPageBytes + 5}, 8, out, tally, &fresh);
  check(damaged && damaged->kind == Fault::Kind::checksum && fresh.size() == 0, "a damaged page does not enter");
}

}  // namespace
}  // namespace memhier

int main() {
  memhier::test_plan();
  memhier::test_ring();
  memhier::test_fence();
  memhier::test_checksums();
  memhier::test_reads();
  memhier::test_pool();
  memhier::test_pool_scan();
  memhier::test_pool_threads();
  memhier::test_reads_with_pool();
  std::puts("reader: plan, ring, fence, checksums, reads and the pool of pages hold");
}
