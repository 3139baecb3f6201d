// The page reader as Python sees it: files by handle, and one crossing of the interpreter lock for a whole batch.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>

#include "bind/buffer.hpp"
#include "bind/module.hpp"
#include "io/pool.hpp"
#include "rank/rounds.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

// A source and what keeps it alive: the Python object that owns the descriptor, and the array of checksums.
struct OpenFile : Source {
  OpenFile(const Source& source, nb::object owner, Buffer checksums)
      : Source(source), owner(std::move(owner)), checksums_view(std::move(checksums)) {}
  nb::object owner;
  Buffer checksums_view;
};

// The open files at one moment. A batch keeps the table it started with, so files may come and go while it runs. Tables
// are only dropped with the GIL held, as that may drop Python objects.
struct Table {
  std::vector<std::shared_ptr<const OpenFile>> files;  // by handle; null where one was removed, until the next is added
  std::vector<const Source*> sources;
};

[[noreturn]] void raise_os_error(const std::system_error& error) {
  const nb::object text = nb::str(error.what());
  const nb::object arguments = nb::make_tuple(error.code().value(), text);
  PyErr_SetObject(PyExc_OSError, arguments.ptr());
  throw nb::python_error();
}

const char* kind_name(Fault::Kind kind) {
  switch (kind) {
    case Fault::Kind::error: return "errno";
    case Fault::Kind::cut_short: return "short";
    case Fault::Kind::checksum: return "checksum";
    case Fault::Kind::range: return "range";
    case Fault::Kind::closed: return "closed";
  }
  return "";
}

nb::object describe(const std::optional<Fault>& fault) {
  if (!fault) return nb::none();
  const nb::object owner = fault->source == nullptr ? nb::none() : static_cast<const OpenFile*>(fault->source)->owner;
  return nb::make_tuple(kind_name(fault->kind), owner, fault->first, fault->second, fault->third);
}

class PageReader {
 public:
  PageReader(std::string engine, unsigned depth)
      : wanted_(std::move(engine)), depth_(depth), table_(std::make_shared<Table>()) {
    make_pool();
  }

  ~PageReader() { forget_parents_pool(); }

  int add(int fd, bool direct, bool drops_cache, std::uint64_t length, nb::handle checksums, nb::object owner) {
    auto file = open(Source{fd, direct, drops_cache, length, nullptr}, checksums, std::move(owner));
    const auto handle = static_cast<int>(std::find(table_->files.begin(), table_->files.end(), nullptr) - table_->files.begin());
    replace(handle, std::move(file));
    return handle;
  }

  void extend(int handle, bool direct, bool drops_cache, std::uint64_t length, nb::handle checksums) {
    const OpenFile& old = at(handle);
    replace(handle, open(Source{old.fd, direct, drops_cache, length, nullptr}, checksums, old.owner));
  }

  void remove(int handle) {
    at(handle);
    replace(handle, nullptr);
  }

  nb::object read(nb::handle files, nb::handle offsets, std::size_t length, nb::handle out, nb::handle latency,
                  nb::handle tally) {
    const bool one_file = PyLong_Check(files.ptr());
    const Buffer file_of = one_file ? Buffer() : Buffer(files, Buffer::Access::read);
    const Buffer starts(offsets, Buffer::Access::read);
    const Buffer rows(out, Buffer::Access::write);
    const Buffer times = Buffer::optional(latency, Buffer::Access::write);
    const Buffer sums = Buffer::optional(tally, Buffer::Access::write);
    const std::size_t count = starts.count<std::int64_t>();
    starts.require(length > 0 && count <= UINT32_MAX, "length: at least 1; offsets: fewer than 2**32");
    starts.require(one_file || file_of.count<std::int32_t>() == count, "file: one int32 per offset");
    rows.require(rows.bytes() / length == count && rows.bytes() % length == 0, "out: length bytes per offset");
    starts.require(times.empty() || times.count<float>() == count, "latency: one float32 per offset");
    starts.require(sums.empty() || sums.count<std::int64_t>() == 3, "tally: three int64");

    const std::shared_ptr<const Table> table = table_;
    const Batch batch{table->sources,
                      one_file ? nullptr : file_of.as<const std::int32_t>(),
                      one_file ? nb::cast<std::int32_t>(files) : 0,
                      starts.as<const std::int64_t>(),
                      count,
                      length,
                      rows.as<std::byte>(),
                      times.empty() ? nullptr : times.as<float>()};
    make_pool_after_fork();
    Counters done;
    std::optional<Fault> fault;
    {
      nb::gil_scoped_release released;
      fault = run(batch, done);
    }
    ++calls_;
    requests_ += count;
    count_reads(done, sums);
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return describe(fault);
  }

  // Exact ranking in rounds; see rounds.hpp. The arrays come checked from memhier.rows.ranking.
  nb::object rank(nb::handle queries, std::size_t dimension, int type, int metric, std::size_t row_bytes,
                  nb::handle first, nb::handle files, nb::handle offsets, nb::handle lower, nb::handle ids,
                  nb::handle thresholds, std::size_t k, std::size_t first_round, std::size_t max_reads,
                  double deadline, nb::handle workspace,
                  nb::handle hot_keys, nb::handle hot_pages, std::size_t per_page, nb::list page_rows,
                  nb::handle out_ids, nb::handle out_distances, nb::handle out_files, nb::handle out_offsets,
                  nb::handle out_tally, nb::handle tally) {
    const Buffer query_view(queries, Buffer::Access::read), first_view(first, Buffer::Access::read);
    const Buffer file_view(files, Buffer::Access::read), offset_view(offsets, Buffer::Access::read);
    const Buffer lower_view(lower, Buffer::Access::read), id_view(ids, Buffer::Access::read);
    const Buffer threshold_view(thresholds, Buffer::Access::read), row_view(workspace, Buffer::Access::write);
    const Buffer key_view(hot_keys, Buffer::Access::read), page_view(hot_pages, Buffer::Access::read);
    const Buffer found_ids(out_ids, Buffer::Access::write), found(out_distances, Buffer::Access::write);
    const Buffer found_files(out_files, Buffer::Access::write), found_offsets(out_offsets, Buffer::Access::write);
    const Buffer found_tally(out_tally, Buffer::Access::write), sums(tally, Buffer::Access::write);
    const std::size_t count = threshold_view.count<float>(), total = offset_view.count<std::int64_t>();
    const auto* starts = first_view.as<const std::int64_t>();
    first_view.require(first_view.count<std::int64_t>() == count + 1 && starts[0] == 0 &&
                           std::is_sorted(starts, starts + count + 1) && starts[count] == static_cast<std::int64_t>(total),
                       "first: ascending, from 0 to the number of candidates");
    query_view.require(dimension > 0 && query_view.count<float>() == count * dimension, "queries: dimension floats each");
    file_view.require(file_view.count<std::int32_t>() == total && lower_view.count<float>() == total &&
                          id_view.count<std::int64_t>() == total,
                      "files, lower, ids: one for each candidate");
    row_view.require(k > 0 && first_round > 0 && row_bytes > 0 && (row_view.bytes() == 0 || row_view.bytes() >= row_bytes),
                     "workspace: empty, or room for a row");
    page_view.require(page_view.bytes() == key_view.count<std::int64_t>() * kPageBytes, "hot_pages: a page for each key");
    found.require(found.count<float>() == count * k && found_ids.count<std::int64_t>() == count * k &&
                      found_files.count<std::int32_t>() == count * k && found_offsets.count<std::int64_t>() == count * k &&
                      found_tally.count<std::int64_t>() == count * 5 && sums.count<std::int64_t>() == 3,
                  "the results: k, k and 5 for each query; three sums");
    row_view.require(type >= 0 && type < kRowTypes && metric >= 0 && metric < kMetrics, "type, metric: known");
    std::vector<Buffer> kept;
    const std::vector<PageRows> of_pages = take_page_rows(page_rows, kept);
    row_view.require(per_page == 0 || (per_page * row_bytes <= kPageBytes && row_view.bytes() == 0),
                     "page_rows: rows that fit their page, which need no workspace");
    const auto* file_of = file_view.as<const std::int32_t>();
    const auto* start_of = offset_view.as<const std::int64_t>();
    for (std::size_t i = 0; per_page > 0 && i < total; ++i) {
      const auto known = [&](const PageRows& rows) {
        return rows.file == file_of[i] && start_of[i] >= 0 &&
               start_of[i] / static_cast<std::int64_t>(kPageBytes) * static_cast<std::int64_t>(per_page) < rows.rows;
      };
      row_view.require(std::any_of(of_pages.begin(), of_pages.end(), known), "page_rows: the rows of every candidate");
    }

    const std::shared_ptr<const Table> table = table_;
    const auto limit = deadline < 1e9 ? std::chrono::nanoseconds(static_cast<std::int64_t>(deadline * 1e9))
                                      : std::chrono::nanoseconds::max();
    const RankBatch batch{query_view.as<const float>(), count, dimension, static_cast<RowType>(type),
                          static_cast<Metric>(metric), row_bytes, starts, file_view.as<const std::int32_t>(),
                          offset_view.as<const std::int64_t>(), lower_view.as<const float>(),
                          id_view.as<const std::int64_t>(), threshold_view.as<const float>(), k, first_round, max_reads, limit,
                          {row_view.as<std::byte>(), row_view.bytes()},
                          {{key_view.as<const std::int64_t>(), key_view.count<std::int64_t>()},
                           page_view.as<const std::byte>()},
                          per_page, of_pages, found_ids.as<std::int64_t>(), found.as<float>(),
                          found_files.as<std::int32_t>(), found_offsets.as<std::int64_t>(), found_tally.as<std::int64_t>()};
    make_pool_after_fork();
    Counters done;
    std::size_t requests = 0, calls = 0;
    bool interrupted = false;
    std::optional<Fault> fault;
    {
      nb::gil_scoped_release released;
      Rounds rounds(batch, [&](Batch reads) -> std::optional<Fault> {
        reads.sources = table->sources;
        requests += reads.count;
        if (++calls % kCallsPerSignal == 0) {
          nb::gil_scoped_acquire acquired;
          interrupted = PyErr_CheckSignals() != 0;
        }
        if (interrupted) return Fault{Fault::Kind::closed};
        return run(reads, done);
      });
      fault = rounds.run();
    }
    ++calls_;
    requests_ += requests;
    count_reads(done, sums);
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return describe(fault);
  }

  nb::dict counters() const {
    nb::dict counts;
    counts["calls"] = calls_;
    counts["requests"] = requests_;
    counts["reads"] = done_.reads;
    counts["pages"] = done_.pages;
    counts["bytes"] = done_.bytes;
    return counts;
  }

  const char* engine() const { return pool_->engine(); }

  std::size_t memory_bytes() const {
    // A pool from before a fork is the parent's memory, and its lock may be held by a thread that is not here.
    return table_bytes() + (pool_->made_here() ? pool_->memory_bytes() : 0);
  }

  std::size_t planned_bytes() const { return table_bytes() + pool_->planned_bytes(); }

  void close() {
    if (pool_->made_here()) {
      nb::gil_scoped_release released;
      pool_->close();
    }
    table_ = std::make_shared<Table>();
  }

 private:
  // Of the many small batches of one ranking, every so manieth looks whether a signal wants the call to end.
  static constexpr std::size_t kCallsPerSignal = 16;

  // What is known of the rows of each file: (file, ids, allowed).
  static std::vector<PageRows> take_page_rows(const nb::list& items, std::vector<Buffer>& kept) {
    std::vector<PageRows> found;
    for (nb::handle item : items) {
      const auto fields = nb::cast<nb::tuple>(item);
      const Buffer& ids = kept.emplace_back(fields[1], Buffer::Access::read);
      const std::size_t width = nb::cast<std::size_t>(fields[1].attr("itemsize"));
      ids.require(width == 4 || width == 8, "page_rows: ids of 4 or 8 bytes");
      PageRows rows{nb::cast<std::int32_t>(fields[0]), static_cast<std::int64_t>(ids.bytes() / width),
                    width == 4 ? ids.as<const std::uint32_t>() : nullptr,
                    width == 8 ? ids.as<const std::int64_t>() : nullptr, nullptr};
      if (!fields[2].is_none()) {
        const Buffer& allowed = kept.emplace_back(fields[2], Buffer::Access::read);
        allowed.require(allowed.count<std::uint64_t>() >= (static_cast<std::size_t>(rows.rows) + 63) / 64,
                        "page_rows: a bit for each row");
        rows.allowed = allowed.as<const std::uint64_t>();
      }
      found.push_back(rows);
    }
    return found;
  }

  void count_reads(const Counters& done, const Buffer& sums) {
    done_.reads += done.reads;
    done_.pages += done.pages;
    done_.bytes += done.bytes;
    if (sums.empty()) return;
    auto* sum = sums.as<std::int64_t>();
    sum[0] += static_cast<std::int64_t>(done.reads);
    sum[1] += static_cast<std::int64_t>(done.pages);
    sum[2] += static_cast<std::int64_t>(done.bytes);
  }

  // Runs without the GIL, and takes it between windows to see whether a signal wants the call to end.
  std::optional<Fault> run(const Batch& batch, Counters& done) {
    const Pool::Loan context(*pool_);
    if (!context) return Fault{Fault::Kind::closed};
    for (std::size_t start = 0; start < batch.count; start += context->window()) {
      if (start > 0) {
        nb::gil_scoped_acquire acquired;
        if (PyErr_CheckSignals() != 0) return std::nullopt;
      }
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

  static std::shared_ptr<const OpenFile> open(Source source, nb::handle checksums, nb::object owner) {
    Buffer view = Buffer::optional(checksums, Buffer::Access::read);
    if (!view.empty()) {
      const std::size_t pages = (source.length + kPageBytes - 1) / kPageBytes;
      view.require(view.count<std::uint32_t>() >= pages, "checksums: one uint32 per page");
      source.checksums = view.as<const std::uint32_t>();
    }
    if (source.direct) source.alignment = direct_alignment(source.fd, kPageBytes);
    return std::make_shared<const OpenFile>(source, std::move(owner), std::move(view));
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
    next->sources[handle] = file.get();
    next->files[handle] = std::move(file);
    table_ = std::move(next);
  }

  void make_pool() {
    try {
      pool_ = std::make_unique<Pool>(wanted_, depth_);
    } catch (const std::system_error& error) {
      raise_os_error(error);
    }
  }

  void make_pool_after_fork() {
    if (pool_->made_here()) return;
    forget_parents_pool();
    make_pool();
  }

  // A child must not touch its parent's rings, nor locks that threads held which did not survive the fork. Leaking the
  // pool is the one safe thing to do with it; its page buffers and rings were not copied to the child anyway.
  void forget_parents_pool() {
    if (pool_ && !pool_->made_here()) static_cast<void>(pool_.release());
  }

  const std::string wanted_;
  const unsigned depth_;
  std::shared_ptr<const Table> table_;
  std::unique_ptr<Pool> pool_;
  std::uint64_t calls_ = 0, requests_ = 0;
  Counters done_;
};

}  // namespace
}  // namespace memhier

void register_reader(nb::module_& m) {
  using memhier::PageReader;
  nb::class_<PageReader>(m, "PageReader")
      .def(nb::init<std::string, unsigned>(), nb::arg("engine"), nb::arg("depth"))
      .def("add", &PageReader::add, nb::arg("fd"), nb::arg("direct"), nb::arg("drops_cache"), nb::arg("length"),
           nb::arg("checksums").none(), nb::arg("file"))
      .def("extend", &PageReader::extend, nb::arg("handle"), nb::arg("direct"), nb::arg("drops_cache"),
           nb::arg("length"), nb::arg("checksums").none())
      .def("remove", &PageReader::remove, nb::arg("handle"))
      .def("read", &PageReader::read, nb::arg("files"), nb::arg("offsets"), nb::arg("length"), nb::arg("out"),
           nb::arg("latency").none(), nb::arg("tally").none() = nb::none())
      .def("rank", &PageReader::rank, nb::arg("queries"), nb::arg("dimension"), nb::arg("type"), nb::arg("metric"),
           nb::arg("row_bytes"), nb::arg("first"), nb::arg("files"), nb::arg("offsets"), nb::arg("lower"),
           nb::arg("ids"), nb::arg("thresholds"), nb::arg("k"), nb::arg("first_round"), nb::arg("max_reads"), nb::arg("deadline"),
           nb::arg("workspace"), nb::arg("hot_keys"), nb::arg("hot_pages"), nb::arg("per_page"),
           nb::arg("page_rows"), nb::arg("out_ids"), nb::arg("out_distances"), nb::arg("out_files"),
           nb::arg("out_offsets"), nb::arg("out_tally"), nb::arg("tally"))
      .def("counters", &PageReader::counters)
      .def("close", &PageReader::close)
      .def_prop_ro("engine", &PageReader::engine)
      .def_prop_ro("memory_bytes", &PageReader::memory_bytes)
      .def_prop_ro("planned_bytes", &PageReader::planned_bytes);
}
