// The page reader as Python sees it: files by handle, and one crossing of the interpreter lock for a whole batch.
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <functional>
#include <limits>
#include <mutex>
#include <tuple>
#include <utility>
#include <variant>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "io/pool.hpp"
#include "io/worker.hpp"
#include "rank/postings.hpp"
#include "rank/rank_arguments.hpp"
#include "rank/rounds.hpp"
#include "search/search_arguments.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

// A source and its owners: the Python object that has the descriptor, and the array of checksums.
using Checksums = std::optional<Array<const std::uint32_t, 1>>;

// A file that holds only some of its extents; `source` (memhier.io.page_source) brings the others. The marks are shared
// with other processes: 0 where an extent is absent, 1 where it is present, 2 where it was used of late.
struct Extents {
  explicit Extents(nb::object from)
      : source(std::move(from)), bytes(nb::cast<std::uint64_t>(source.attr("extent_bytes"))) {
    require(marks.take(source.attr("marks")) && bytes > 0, "source: marks, uint8 [n], and the bytes of an extent");
  }
  // Marks a present extent as used; false if it is absent.
  bool use(std::uint64_t extent) const {
    std::atomic_ref<std::uint8_t> mark(marks.data()[extent]);
    std::uint8_t present = 1;
    return mark.load(std::memory_order_acquire) == 2 || mark.compare_exchange_strong(present, 2) || present != 0;
  }
  nb::object source;
  std::uint64_t bytes;
  Array<std::uint8_t, 1> marks;
};
using SharedExtents = std::shared_ptr<const Extents>;

struct OpenFile : Source {
  OpenFile(const Source& source, nb::object owner_, Checksums sums, SharedExtents extents_)
      : Source(source), owner(std::move(owner_)), checksum_array(std::move(sums)), extents(std::move(extents_)) {}
  nb::object owner;
  Checksums checksum_array;
  SharedExtents extents;
};

// The open files at one moment. A batch keeps the table it started with, so files may come and go while it runs. Tables
// are only dropped with the GIL held, as that may drop Python objects.
struct Table {
  std::vector<std::shared_ptr<const OpenFile>> files;  // by handle; null where one was removed, until the next is added
  std::vector<const Source*> sources;
  bool partial = false;  // whether any file may lack extents
};

// Has the extents brought that requests [start, stop) need and files lack; false once a Python error is set.
bool bring_absent(const Table& table, const Batch& batch, std::size_t start, std::size_t stop) {
  std::vector<std::pair<std::int64_t, std::uint64_t>> absent;
  for (std::size_t i = start; i < std::min(stop, batch.count); ++i) {
    const std::int64_t handle = batch.files == nullptr ? batch.file : batch.files[i];
    if (handle < 0 || static_cast<std::size_t>(handle) >= table.files.size()) continue;  // refused when it is planned
    const OpenFile* file = table.files[handle].get();
    if (file == nullptr || !file->extents || batch.offsets[i] < 0) continue;
    const Extents& extents = *file->extents;
    const auto first = static_cast<std::uint64_t>(batch.offsets[i]);
    for (std::uint64_t at = first / extents.bytes;
         at <= (first + batch.length - 1) / extents.bytes && at < extents.marks.size(); ++at)
      if (!extents.use(at)) absent.emplace_back(handle, at);
  }
  if (absent.empty()) return true;
  std::sort(absent.begin(), absent.end());
  absent.erase(std::unique(absent.begin(), absent.end()), absent.end());
  nb::gil_scoped_acquire acquired;
  try {
    nb::list wanted;
    for (const auto& [handle, extent] : absent)
      wanted.append(nb::make_tuple(table.files[handle]->extents->source, extent));
    table.files[absent.front().first]->extents->source.attr("fetch")(wanted);
    return true;
  } catch (nb::python_error& error) {
    error.restore();
    return false;
  }
}

[[noreturn]] void raise_os_error(const std::system_error& error) {
  const nb::object text = nb::str(error.what());
  const nb::object arguments = nb::make_tuple(error.code().value(), text);
  PyErr_SetObject(PyExc_OSError, arguments.ptr());
  throw nb::python_error();
}

constexpr std::array kKindNames = {"errno", "short", "checksum", "range", "closed", "layout"};  // in their order
static_assert(kKindNames.size() == static_cast<std::size_t>(Fault::Kind::layout) + 1);

// Kind, the file's owner, and three numbers; see memhier.io.faults.
using Description = std::tuple<const char*, nb::object, std::int64_t, std::int64_t, std::int64_t>;

std::optional<Description> describe(const std::optional<Fault>& fault) {
  if (!fault) return std::nullopt;
  const nb::object owner = fault->source == nullptr ? nb::none() : static_cast<const OpenFile*>(fault->source)->owner;
  return Description(kKindNames[static_cast<std::size_t>(fault->kind)], owner, fault->first, fault->second,
                     fault->third);
}

// The items that are looked for, and where; see PostingSearch.
struct PostingRequest {
  std::int32_t file;
  std::int64_t end;
  Array<const std::uint64_t, 1> directory;  // the blocks, then the item of every 256th record
  std::size_t count;                        // of blocks
  Array<const std::byte, 1> items;
  std::vector<std::int64_t> ends, filters;
  bool floats;
  std::int64_t start, rows;

  void check(const Array<std::uint64_t>& words) const {
    require(start >= 0 && rows >= 0, "start, rows: a row, and a number of rows");
    require(count <= directory.size() / kBlockWords, "directory: of so many blocks");
    std::size_t pages = 0;
    for (const PostingBlock& block : blocks()) {
      require(block.count >= 0 && block.count < std::numeric_limits<std::uint32_t>::max() && block.first >= 0 &&
                  block.records >= 0 && block.records <= end && block.records % 2 == 0,
              "directory: rows are counted from 0, records lie in the file at even places");
      pages += (static_cast<std::size_t>(block.count) + kPageRecords - 1) / kPageRecords;
    }
    require(directory.size() == kBlockWords * count + pages && items.bytes() % 8 == 0,
            "directory, items: 8 bytes each");
    require(!ends.empty() && ends[0] >= 0 && std::is_sorted(ends.begin(), ends.end()) &&
                ends.back() == static_cast<std::int64_t>(items.bytes() / 8),
            "ends: ascending, to the number of items");
    require(!filters.empty() && filters[0] >= 1 &&
                std::adjacent_find(filters.begin(), filters.end(), std::greater_equal{}) == filters.end() &&
                filters.back() == static_cast<std::int64_t>(ends.size()),
            "filters: of each a group or more, to the number of groups");
    require(words.size() == filters.size() * ((static_cast<std::size_t>(rows) + 63) / 64), "words: a bit for each row");
  }
  std::span<const PostingBlock> blocks() const {
    return {reinterpret_cast<const PostingBlock*>(directory.data()), count};
  }
  PostingSearch on(const Array<std::uint64_t>& words) const {
    return {file, end, blocks(), items.data(), ends, filters, floats, start, rows, {words.data(), words.size()}};
  }

  static constexpr std::size_t kBlockWords = sizeof(PostingBlock) / sizeof(std::uint64_t);
};

class PageReader {
 public:
  friend class PendingRead;

  PageReader(std::string engine, unsigned depth, unsigned contexts, unsigned run_pages)
      : wanted_(std::move(engine)), depth_(depth), contexts_(contexts), run_pages_(run_pages),
        table_(std::make_shared<Table>()) {
    make_pool();
  }

  ~PageReader() { forget_parents_pool(); }

  int add(int fd, bool direct, bool drops_cache, std::uint64_t length, Checksums checksums, nb::object owner,
          nb::object source, bool held) {
    auto extents = source.is_none() ? nullptr : std::make_shared<const Extents>(std::move(source));
    auto file = open(Source{fd, direct, drops_cache, length, nullptr}, std::move(checksums), std::move(owner),
                     std::move(extents), held);
    const auto handle =
        static_cast<int>(std::find(table_->files.begin(), table_->files.end(), nullptr) - table_->files.begin());
    replace(handle, std::move(file));
    return handle;
  }

  void extend(int handle, bool direct, bool drops_cache, std::uint64_t length, Checksums checksums) {
    const OpenFile& old = at(handle);
    replace(handle, open(Source{old.fd, direct, drops_cache, length, nullptr}, std::move(checksums), old.owner,
                         old.extents, old.held_as >= 0));
  }

  void remove(int handle) {
    at(handle);
    replace(handle, nullptr);
  }

  std::optional<Description> read(const std::variant<std::int32_t, Array<const std::int32_t, 1>>& files,
                                  const Array<const std::int64_t, 1>& offsets, std::size_t length,
                                  const Array<std::byte>& out, const std::optional<Array<float, 1>>& latency,
                                  const std::optional<Array<ReadTally, 1>>& tally) {
    const auto* one_file = std::get_if<std::int32_t>(&files);
    const auto* file_of = std::get_if<1>(&files);
    const std::size_t count = offsets.size();
    require(length > 0 && count <= UINT32_MAX, "length: at least 1; offsets: fewer than 2**32");
    require(file_of == nullptr || file_of->size() == count, "file: one int32 per offset");
    require(out.bytes() / length == count && out.bytes() % length == 0, "out: length bytes per offset");
    require(!latency || latency->size() == count, "latency: one float32 per offset");
    require(!tally || tally->size() == 1, "tally: one record");

    make_pool_after_fork();
    const std::shared_ptr<const Table> table = table_;
    const std::shared_ptr<BufferPool> held = held_;
    const Batch batch{table->sources,
                      file_of == nullptr ? nullptr : file_of->data(),
                      one_file == nullptr ? 0 : *one_file,
                      offsets.data(),
                      count,
                      length,
                      out.data(),
                      latency ? latency->data() : nullptr,
                      nullptr,
                      held.get()};
    ReadTally done;
    std::optional<Fault> fault;
    {
      nb::gil_scoped_release released;
      fault = run(*table, batch, done);
    }
    count_call(count, done);
    if (tally) (*tally)[0] += done;
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return describe(fault);
  }

  // Exact ranking in rounds; see rounds.hpp. The arrays come checked from memhier.rows.ranking. workspace: empty, or
  // the rows of one submission; hot_pages: a page for each key; page_rows: of every file, where rows lie whole in their
  // pages.
  std::optional<Description> rank(const RankRequest& of, const RankResult& result, const Array<std::byte, 2>& workspace,
                                  const Array<const std::int64_t, 1>& hot_keys,
                                  const Array<const std::byte, 2>& hot_pages,
                                  const std::vector<const PageRowArrays*>& page_rows, std::size_t per_page,
                                  const Array<ReadTally, 1>& tally) {
    const std::size_t count = of.queries.shape(0), total = of.offsets.size();
    of.check();
    result.check(count, of.k, total);
    require(workspace.bytes() == 0 || workspace.bytes() >= of.row_bytes, "workspace: empty, or room for a row");
    require(hot_pages.bytes() == hot_keys.size() * kPageBytes, "hot_pages: a page for each key");
    require(tally.size() == 1, "tally: one record");
    require(per_page == 0 || (per_page * of.row_bytes <= kPageBytes && workspace.bytes() == 0),
            "page_rows: rows that fit their page, which need no workspace");
    std::vector<PageRows> of_pages;
    for (const PageRowArrays* arrays : page_rows) of_pages.push_back(arrays->view());
    const std::span<const PageRows> of_all(of_pages);
    for (std::size_t i = 0; per_page > 0 && i < total; ++i) {
      const auto known = [&](const PageRows& rows) {
        return rows.file == of.files[i] && of.offsets[i] >= 0 &&
               of.offsets[i] / static_cast<std::int64_t>(kPageBytes) * static_cast<std::int64_t>(per_page) < rows.rows;
      };
      require(std::any_of(of_pages.begin(), of_pages.end(), known), "page_rows: the rows of every candidate");
    }

    return read_all(
        [&](const ReadBatch& read) {
          const RankBatch batch{of.queries.data(),
                                count,
                                of.queries.shape(1),
                                static_cast<RowType>(of.type),
                                static_cast<Metric>(of.metric),
                                of.row_bytes,
                                of.first.data(),
                                of.files.data(),
                                of.offsets.data(),
                                of.lower.data(),
                                of.ids.data(),
                                of.thresholds.data(),
                                of.k,
                                of.first_round,
                                of.max_reads,
                                time_limit(of.deadline),
                                {workspace.data(), workspace.bytes()},
                                {{hot_keys.data(), hot_keys.size()}, hot_pages.data()},
                                per_page,
                                {&of_all, 1},
                                result.ids.data(),
                                result.distances.data(),
                                result.files.data(),
                                result.offsets.data(),
                                result.tally.data(),
                                result.rounds ? result.rounds->data() : nullptr};
          return Rounds(batch, read).run();
        },
        tally[0]);
  }

  // From queries to their nearest: finds the candidates (candidate_search.hpp) of each request in its state, then ranks
  // them all. The queries of a request lie behind those of the one before. workspace as in rank().
  std::optional<Description> search(const std::vector<const IndexState*>& states,
                                    const std::vector<const SearchRequest*>& requests, const SearchOutput& out,
                                    const Array<std::byte, 2>& workspace, const Array<ReadTally, 1>& tally) {
    const std::size_t count = check_together(states, requests);
    out.check(count, requests.front()->effort.k);
    require(tally.size() == 1, "tally: one record");
    std::vector<AskedQueries> asked;
    for (std::size_t i = 0; i < states.size(); ++i) {
      const SearchRequest& each = *requests[i];
      asked.push_back({states[i], &each.effort, &each.routes, each.queries.data(), each.queries.shape(0),
                       each.radius ? each.radius->data() : nullptr});
    }
    return answer(asked, out.view(), workspace, tally[0]);
  }

  // Searches for another query as for those of a request: its nearest [k], and the numbers of a PlainWork.
  std::optional<Description> search_plainly(const IndexState& state, const SearchRequest& request,
                                            const Array<const float, 2>& query, const Array<std::int64_t, 2>& ids,
                                            const Array<float, 2>& distances, const Array<std::byte, 2>& workspace,
                                            const Array<std::int64_t, 1>& numbers) {
    PlainWork work{};
    static_assert(sizeof work == 14 * sizeof(std::int64_t));
    const std::size_t k = request.effort.k;
    require(query.has_shape(1, state.space.dimension()) && ids.has_shape(1, k) && distances.has_shape(1, k) &&
                numbers.bytes() == sizeof work,
            "query, ids, distances, numbers: [1, d], [1, k], [1, k] and [14]");
    const AskedQueries asked{&state, &request.effort, &request.routes, query.data(), 1, nullptr};
    auto fault = answer({&asked, 1},
                        {ids.data(), distances.data(), nullptr, nullptr, &work.scanned, &work.candidates, &work.ranked},
                        workspace, work.read);
    std::memcpy(numbers.data(), &work, sizeof work);
    return fault;
  }

  // Sets the bits of the rows that hold one of some items; see postings.hpp.
  std::optional<Description> mark_rows(const PostingRequest& of, const Array<std::uint64_t>& words) {
    of.check(words);
    make_pool_after_fork();
    const std::shared_ptr<const Table> table = table_;
    const std::shared_ptr<BufferPool> held = held_;
    require(of.file >= 0 && static_cast<std::size_t>(of.file) < table->sources.size(), "file: an open handle");
    ReadTally done;
    std::size_t requests = 0;
    std::optional<Fault> fault;
    {
      nb::gil_scoped_release released;
      fault = memhier::mark_rows(of.on(words), batches_on(*table, held.get(), requests, done));
    }
    count_call(requests, done);
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    if (fault && fault->kind == Fault::Kind::layout) fault->source = table->sources[static_cast<std::size_t>(of.file)];
    return describe(fault);
  }

  nb::typed<nb::dict, nb::str, nb::int_> counters() const {
    nb::typed<nb::dict, nb::str, nb::int_> counts;
    counts["calls"] = calls_;
    counts["requests"] = requests_;
    counts["reads"] = done_.reads;
    counts["pages"] = done_.pages;
    counts["bytes"] = done_.bytes;
    const bool has_pool = held_ != nullptr && pool_->made_here();
    counts["pool_pages"] = has_pool ? static_cast<std::int64_t>(held_->size()) : 0;
    counts["pool_hits"] = hits_before_ + (has_pool ? held_->hits() : 0);
    return counts;
  }

  const char* engine() const { return pool_->engine(); }

  std::size_t memory_bytes() const {
    // A pool from before a fork is the parent's memory, and its lock may be held by a thread that is not here.
    return table_bytes() + pool_bytes() +
           (pool_->made_here() ? pool_->memory_bytes() + background_->memory_bytes() : 0);
  }

  std::size_t pool_bytes() const { return held_ != nullptr && pool_->made_here() ? held_->bytes() : 0; }

  // Holds up to so many pages in DRAM of the files that were added for it. Fewer than half of those it was made for
  // make it anew, so that its tables shrink as well.
  void hold_pages(std::size_t pages) {
    make_pool_after_fork();
    const std::size_t capacity = held_ == nullptr ? 0 : held_->capacity();
    pages_held_ = pages;
    const bool fits = capacity > 0 && pages <= capacity && pages >= capacity / 2;
    if (const std::shared_ptr<BufferPool> held = held_; held != nullptr) {
      nb::gil_scoped_release released;
      held->set_room(fits ? pages : 0);  // calls under way may keep it for a while
    }
    if (fits) return;
    if (held_ != nullptr) {
      hits_before_ += held_->hits();
      held_.reset();
    }
    if (pages > 0) make_held(capacity == 0 ? pages : pages + pages / 4);
  }

  std::size_t planned_bytes() const { return table_bytes() + pool_->planned_bytes(); }

  void close() {
    const auto end_kept = std::exchange(end_kept_, nullptr);  // of the parent in its child, and may be gone there
    closed_ = true;
    if (pool_->made_here()) {
      if (end_kept) end_kept();
      nb::gil_scoped_release released;
      pool_->close();
    }
    table_ = std::make_shared<Table>();
    if (pool_->made_here()) held_.reset();
  }

 private:
  static constexpr std::int64_t kFilesHeld = std::int64_t{1} << 23;  // as many as keys of pages have numbers for
  // Of the many small batches of one ranking, every so manieth looks whether a signal wants the call to end.
  static constexpr std::size_t kCallsPerSignal = 16;

  // Fills the answers to queries, of all of which the limits are the same.
  std::optional<Description> answer(std::span<const AskedQueries> every, const SearchAnswers& out,
                                    const Array<std::byte, 2>& workspace, ReadTally& tally) {
    const IndexState& state = *every.front().state;
    const SearchEffort& effort = *every.front().effort;
    require(state.stored.per_page > 0 || workspace.bytes() >= state.stored.row_bytes, "workspace: room for a row");
    RankedRows found;
    std::vector<std::span<const PageRows>> page_rows;
    return read_all(
        [&](const ReadBatch& read) -> std::optional<Fault> {
          std::size_t count = 0;
          for (const AskedQueries& each : every) {
            CandidateSearch candidates(*each.state, *each.effort, *each.routes);
            if (auto fault = candidates.run(each.queries, each.count, each.radius, out.scanned + count,
                                            out.admitted + count, read, found))
              return fault;
            page_rows.insert(page_rows.end(), every.size() == 1 ? 1 : each.count, each.state->rows);
            count += each.count;
          }
          const RankBatch batch{every.front().queries,
                                count,
                                state.space.dimension(),
                                static_cast<RowType>(state.stored.type),
                                state.space.metric(),
                                state.stored.row_bytes,
                                found.first.data(),
                                found.files.data(),
                                found.offsets.data(),
                                found.lower.data(),
                                found.ids.data(),
                                found.thresholds.data(),
                                effort.k,
                                effort.first_round,
                                effort.max_reads,
                                time_limit(effort.deadline),
                                {workspace.data(), workspace.bytes()},
                                state.stored.hot(),
                                state.stored.per_page,
                                page_rows,
                                out.ids,
                                out.distances,
                                out.files,
                                out.offsets,
                                out.ranked,
                                nullptr};
          if (auto fault = Rounds(batch, read).run()) return fault;
          return name_rows(state, found, out.ids, count * effort.k, read);
        },
        tally);
  }

  // Runs work that reads many small batches, without the GIL.
  template <class Work>
  std::optional<Description> read_all(const Work& work, ReadTally& tally) {
    make_pool_after_fork();
    const std::shared_ptr<const Table> table = table_;
    const std::shared_ptr<BufferPool> held = held_;
    ReadTally done;
    std::size_t requests = 0;
    std::optional<Fault> fault;
    {
      nb::gil_scoped_release released;
      fault = work(batches_on(*table, held.get(), requests, done));
    }
    count_call(requests, done);
    tally += done;
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return describe(fault);
  }

  // Returns a way to run many small batches without the GIL, which counts what they do.
  ReadBatch batches_on(const Table& table, BufferPool* held, std::size_t& requests, ReadTally& done) {
    return [this, &table, held, &requests, &done, calls = std::size_t{0}](Batch reads) mutable -> std::optional<Fault> {
      reads.sources = table.sources;
      reads.pool = held;
      requests += reads.count;
      if (++calls % kCallsPerSignal == 0) {
        nb::gil_scoped_acquire acquired;
        if (PyErr_CheckSignals() != 0) return Fault{Fault::Kind::closed};
      }
      return run(table, reads, done);
    };
  }

  void count_call(std::size_t requests, const ReadTally& done) {
    ++calls_;
    requests_ += requests;
    done_ += done;
  }

  // Runs without the GIL, and takes it between windows to see whether a signal wants the call to end.
  std::optional<Fault> run(const Table& table, const Batch& batch, ReadTally& done) {
    // Before the loan, which others may wait for.
    if (table.partial && !bring_absent(table, batch, 0, kWindowRequests)) return Fault{Fault::Kind::closed};
    const Pool::Loan context(*pool_);
    if (!context) return Fault{Fault::Kind::closed};
    for (std::size_t start = 0; start < batch.count; start += context->window()) {
      if (start > 0) {
        nb::gil_scoped_acquire acquired;
        if (PyErr_CheckSignals() != 0) return std::nullopt;
      }
      if (start > 0 && table.partial && !bring_absent(table, batch, start, start + context->window()))
        return Fault{Fault::Kind::closed};
      if (auto fault = context->read_window(batch, start, done)) return fault;
    }
    return std::nullopt;
  }

  std::size_t table_bytes() const {
    const auto& files = table_->files;
    // Of a file that was removed only its place is left, for the next one.
    const auto removed = static_cast<std::size_t>(std::count(files.begin(), files.end(), nullptr));
    return (files.size() - removed) * sizeof(OpenFile) + files.size() * (sizeof(files[0]) + sizeof(Source*));
  }

  std::shared_ptr<const OpenFile> open(Source source, Checksums checksums, nb::object owner, SharedExtents extents,
                                       bool held) {
    if (held && files_held_ < kFilesHeld) source.held_as = files_held_++;  // never that of another file
    if (checksums) {
      const std::size_t pages = (source.length + kPageBytes - 1) / kPageBytes;
      require(checksums->size() >= pages, "checksums: one uint32 per page");
      source.checksums = checksums->data();
    }
    if (source.direct) source.alignment = direct_alignment(source.fd, kPageBytes);
    return std::make_shared<const OpenFile>(source, std::move(owner), std::move(checksums), std::move(extents));
  }

  const OpenFile& at(int handle) const {
    if (handle < 0 || static_cast<std::size_t>(handle) >= table_->files.size() || !table_->files[handle])
      throw nb::value_error("file: not an open handle");
    return *table_->files[handle];
  }

  void replace(int handle, std::shared_ptr<const OpenFile> file) {
    auto next = std::make_shared<Table>(*table_);
    const std::size_t count = std::max(next->files.size(), static_cast<std::size_t>(handle) + 1);
    next->sources.resize(count);
    next->files.resize(count);
    if (held_ != nullptr && pool_->made_here()) {
      if (const auto& old = next->files[handle]; old != nullptr) held_->drop_file(old->held_as);
      if (file != nullptr && file->held_as >= 0) held_->add_file(file->held_as);
    }
    next->sources[handle] = file.get();
    next->files[handle] = std::move(file);
    next->partial = std::any_of(next->files.begin(), next->files.end(),
                                [](const auto& each) { return each != nullptr && each->extents; });
    table_ = std::move(next);
  }

  void make_pool() {
    try {
      pool_ = std::make_unique<Pool>(wanted_, depth_, contexts_, run_pages_);
      background_ = std::make_unique<Background>();
    } catch (const std::system_error& error) {
      raise_os_error(error);
    }
  }

  void make_held(std::size_t capacity) {
    try {
      held_ = std::make_shared<BufferPool>(capacity);
    } catch (const std::system_error& error) {
      raise_os_error(error);
    }
    held_->set_room(pages_held_);
    for (const auto& file : table_->files)
      if (file != nullptr && file->held_as >= 0) held_->add_file(file->held_as);
  }

  void make_pool_after_fork() {
    if (pool_->made_here()) return;
    const std::size_t capacity = held_ == nullptr ? 0 : held_->capacity();
    forget_parents_pool();
    make_pool();
    if (capacity > 0) make_held(capacity);
  }

  // A child must not touch its parent's rings, nor locks that threads held which did not survive the fork. Leaking the
  // pool is the one safe thing to do with it; its page buffers and rings were not copied to the child anyway.
  void forget_parents_pool() {
    if (!pool_ || pool_->made_here()) return;
    end_kept_ = nullptr;
    static_cast<void>(pool_.release());
    static_cast<void>(background_.release());
    if (held_ != nullptr) static_cast<void>(new std::shared_ptr<BufferPool>(std::move(held_)));
  }

  const std::string wanted_;
  const unsigned depth_, contexts_, run_pages_;
  std::shared_ptr<const Table> table_;
  std::unique_ptr<Pool> pool_;
  std::unique_ptr<Background> background_;
  std::function<void()> end_kept_;  // ends the read that keeps a context of the pool
  bool closed_ = false;
  std::shared_ptr<BufferPool> held_;  // null: no page is held
  std::size_t pages_held_ = 0;        // at most
  std::int64_t files_held_ = 0, hits_before_ = 0;
  std::uint64_t calls_ = 0, requests_ = 0;
  ReadTally done_;
};

// Adds the time until its end to a number of seconds.
class Timer {
 public:
  explicit Timer(double& seconds) : seconds_(seconds) {}
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  ~Timer() { seconds_ += std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  double& seconds_;
  const Clock::time_point start_ = Clock::now();
};

// A read that goes on between calls: a few ranges in a context kept for them, many on a thread of the reader. Python
// keeps the reader at least as long; one thread may close the reader while another waits.
class PendingRead {
 public:
  PendingRead(PageReader& reader, Array<const std::int32_t, 1> files, Array<const std::int64_t, 1> offsets,
              std::size_t length, Array<std::byte> out)
      : reader_(reader), files_(std::move(files)), offsets_(std::move(offsets)), out_(std::move(out)) {
    const std::size_t count = offsets_.size();
    require(length > 0 && count > 0 && count <= UINT32_MAX, "length, offsets: at least 1; offsets: fewer than 2**32");
    require(files_.size() == count, "files: one int32 per offset");
    require(out_.bytes() / length == count && out_.bytes() % length == 0, "out: length bytes per offset");
    reader_.make_pool_after_fork();
    table_ = reader_.table_;
    require(!table_->partial, "files: all of them whole");
    held_ = reader_.held_;
    batch_ = {table_->sources, files_.data(), 0,       offsets_.data(), count,
              length,          out_.data(),   nullptr, nullptr,         held_.get()};
    if (begin()) return;
    job_.work = [this, &pool = *reader_.pool_] { read(pool); };
    try {
      reader_.background_->post(job_);
    } catch (const std::system_error& error) {
      raise_os_error(error);
    }
  }
  PendingRead(const PendingRead&) = delete;
  PendingRead& operator=(const PendingRead&) = delete;
  ~PendingRead() { end(); }

  bool done() {
    if (ended_ || owner_ != ::getpid()) return true;
    if (context_ == nullptr) return job_.done.load();
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    if (ended_) return true;
    const Timer timer(seconds_);
    return context_->land_finished();
  }
  double seconds() const { return seconds_; }

  std::optional<Description> wait() {
    end();
    return describe(fault_);
  }

 private:
  // Hands over a few reads here, which costs less than a switch to the thread; false if that has to read.
  bool begin() {
    Context* const kept = reader_.pool_->keep();
    if (kept == nullptr) return false;
    bool begun = false;
    {
      nb::gil_scoped_release released;
      const Timer timer(seconds_);
      begun = kept->begin(batch_);
    }
    if (begun) {
      context_ = kept;
      reader_.end_kept_ = [this] {
        const nb::object self = nb::find(*this);
        end();
      };
      if (reader_.closed_) end();  // the pool waits for the context
    } else {
      reader_.pool_->give_back_kept(kept);
    }
    return begun;
  }

  void read(Pool& pool) {
    const Timer timer(seconds_);
    const Pool::Loan context(pool);
    if (!context) fault_ = Fault{Fault::Kind::closed};
    for (std::size_t at = 0; at < batch_.count && !fault_; at += context->window())
      fault_ = context->read_window(batch_, at, tally_);
  }

  void end() {
    if (ended_) return;
    if (owner_ != ::getpid()) {  // the thread is the parent's
      ended_ = true;
      fault_ = Fault{Fault::Kind::closed};
      return;
    }
    if (context_ != nullptr) reader_.end_kept_ = nullptr;
    {
      nb::gil_scoped_release released;
      const std::lock_guard lock(mutex_);
      if (ended_) return;
      if (context_ != nullptr) {
        const Timer timer(seconds_);
        fault_ = context_->land_all(tally_);
      } else if (!job_.done.load()) {
        reader_.background_->wait(job_);
      }
      ended_ = true;
      if (context_ != nullptr) reader_.pool_->give_back_kept(context_);
    }
    reader_.count_call(batch_.count, tally_);
  }

  PageReader& reader_;
  const Array<const std::int32_t, 1> files_;
  const Array<const std::int64_t, 1> offsets_;
  const Array<std::byte> out_;
  const pid_t owner_ = ::getpid();
  std::shared_ptr<const Table> table_;
  std::shared_ptr<BufferPool> held_;
  Batch batch_;
  ReadTally tally_;
  std::optional<Fault> fault_;
  double seconds_ = 0;
  std::mutex mutex_;  // of the context, and of the end
  std::atomic<bool> ended_ = false;
  Context* context_ = nullptr;  // kept while it reads for this one; null where the thread reads
  Background::Job job_;
};

}  // namespace
}  // namespace memhier

void register_reader(nb::module_& m) {
  using namespace memhier;
  using namespace nb::literals;
  nb::class_<PageRowArrays>(m, "PageRows")
      .def(nb::init<std::int32_t, std::optional<Ids>, std::int64_t, std::size_t,
                    std::optional<Array<const std::uint64_t, 1>>>(),
           nb::kw_only(), "file"_a, "ids"_a.none(), "first"_a, "rows"_a, "allowed"_a.none());
  nb::class_<RankRequest>(m, "RankRequest")
      .def(nb::init<Array<const float, 2>, int, int, std::size_t, Array<const std::int64_t, 1>,
                    Array<const std::int32_t, 1>, Array<const std::int64_t, 1>, Array<const float, 1>,
                    Array<const std::int64_t, 1>, Array<const float, 1>, std::size_t, std::size_t, std::size_t,
                    double>(),
           nb::kw_only(), "queries"_a, "type"_a, "metric"_a, "row_bytes"_a, "first"_a, "files"_a, "offsets"_a,
           "lower"_a, "ids"_a, "thresholds"_a, "k"_a, "first_round"_a, "max_reads"_a, "deadline"_a);
  nb::class_<RankResult>(m, "RankResult")
      .def(nb::init<Array<std::int64_t, 2>, Array<float, 2>, Array<std::int32_t, 2>, Array<std::int64_t, 2>,
                    Array<RankTally, 1>, std::optional<Array<std::int32_t, 1>>>(),
           nb::kw_only(), "ids"_a, "distances"_a, "files"_a, "offsets"_a, "tally"_a, "rounds"_a.none());
  nb::class_<PostingRequest>(m, "PostingRequest")
      .def(nb::init<std::int32_t, std::int64_t, Array<const std::uint64_t, 1>, std::size_t, Array<const std::byte, 1>,
                    std::vector<std::int64_t>, std::vector<std::int64_t>, bool, std::int64_t, std::int64_t>(),
           nb::kw_only(), "file"_a, "end"_a, "directory"_a, "count"_a, "items"_a, "ends"_a, "filters"_a, "floats"_a,
           "start"_a, "rows"_a);
  auto reader = nb::class_<PageReader>(m, "PageReader");
  nb::class_<PendingRead>(m, "PendingRead")
      .def(nb::init<PageReader&, Array<const std::int32_t, 1>, Array<const std::int64_t, 1>, std::size_t,
                    Array<std::byte>>(),
           nb::keep_alive<1, 2>(), nb::kw_only(), "reader"_a, "files"_a, "offsets"_a, "length"_a, "out"_a)
      .def("done", &PendingRead::done)
      .def("wait", &PendingRead::wait)
      .def_prop_ro("seconds", &PendingRead::seconds);
  reader
      .def(nb::init<std::string, unsigned, unsigned, unsigned>(), nb::kw_only(), "engine"_a, "depth"_a, "contexts"_a,
           "run_pages"_a)
      .def("add", &PageReader::add, nb::kw_only(), "fd"_a, "direct"_a, "drops_cache"_a, "length"_a,
           "checksums"_a.none(), "file"_a, "source"_a.none() = nb::none(), "held"_a = false)
      .def("extend", &PageReader::extend, nb::kw_only(), "handle"_a, "direct"_a, "drops_cache"_a, "length"_a,
           "checksums"_a.none())
      .def("remove", &PageReader::remove, "handle"_a)
      .def("hold_pages", &PageReader::hold_pages, "pages"_a)
      .def("read", &PageReader::read, nb::kw_only(), "files"_a, "offsets"_a, "length"_a, "out"_a,
           "latency"_a.none() = nb::none(), "tally"_a.none() = nb::none())
      .def("rank", &PageReader::rank, nb::kw_only(), "request"_a, "result"_a, "workspace"_a, "hot_keys"_a,
           "hot_pages"_a, "page_rows"_a, "per_page"_a, "tally"_a)
      .def("search", &PageReader::search, nb::kw_only(), "states"_a, "requests"_a, "result"_a, "workspace"_a, "tally"_a)
      .def("search_plainly", &PageReader::search_plainly, nb::kw_only(), "state"_a, "request"_a, "query"_a, "ids"_a,
           "distances"_a, "workspace"_a, "numbers"_a)
      .def("mark_rows", &PageReader::mark_rows, nb::kw_only(), "request"_a, "words"_a)
      .def("counters", &PageReader::counters)
      .def("close", &PageReader::close)
      .def_prop_ro("engine", &PageReader::engine)
      .def_prop_ro("memory_bytes", &PageReader::memory_bytes)
      .def_prop_ro("planned_bytes", &PageReader::planned_bytes)
      .def_prop_ro("pool_bytes", &PageReader::pool_bytes);
}
