// From byte ranges to reads: each page once, neighbours together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "io/engine.hpp"

namespace memhier {

// A byte range one row of the result wants. All ranges of a call have the same length, so in sorted order both their
// first and their last pages ascend, and the requests that touch a page are neighbours.
struct Request {
  std::uint64_t offset;
  std::uint32_t file;
  std::uint32_t row;

  std::uint64_t first_page() const { return offset / kPageBytes; }
  std::uint64_t last_page(std::uint64_t length) const { return (offset + length - 1) / kPageBytes; }
};

struct Run {
  std::uint32_t file;
  std::uint64_t page;
  std::uint32_t pages;
  std::uint32_t first_request;
  std::uint32_t stop_request;
};

// Requests planned at a time: enough that merging finds its neighbours, few enough that a plan stays small, also beside
// the buffers of a reader with few reads in flight.
constexpr std::size_t kWindowRequests = 16384, kWindowPerRead = 128;

class Plan {
 public:
  Plan(std::uint64_t length, std::size_t run_pages) : length_(length), run_pages_(run_pages) {}

  static void sort(std::vector<Request>& requests) {
    std::sort(requests.begin(), requests.end(), [](const Request& a, const Request& b) {
      return a.file != b.file ? a.file < b.file : a.offset < b.offset;
    });
  }

  // Takes sorted requests, which must stay put while runs are taken.
  void start(const std::vector<Request>& requests) {
    requests_ = &requests;
    at_ = 0;
    next_page_ = 0;
  }

  bool finished() const { return at_ == requests_->size(); }

  Run next() {
    const std::vector<Request>& all = *requests_;
    const std::uint32_t file = all[at_].file;
    const std::uint64_t first = std::max(all[at_].first_page(), next_page_);
    const std::uint64_t limit = first + run_pages_;
    std::uint64_t end = all[at_].last_page(length_) + 1;
    std::size_t stop = at_ + 1;
    while (stop < all.size() && all[stop].file == file && all[stop].first_page() <= end &&
           all[stop].first_page() < limit)
      end = all[stop++].last_page(length_) + 1;
    end = std::min(end, limit);
    const Run run{file, first, static_cast<std::uint32_t>(end - first), static_cast<std::uint32_t>(at_),
                  static_cast<std::uint32_t>(stop)};
    next_page_ = end;
    while (at_ < stop && all[at_].last_page(length_) < end) ++at_;
    if (at_ == all.size() || all[at_].file != file) next_page_ = 0;
    return run;
  }

 private:
  std::uint64_t length_, run_pages_;  // bytes of a range, and pages of a run at most
  const std::vector<Request>* requests_ = nullptr;
  std::size_t at_ = 0;           // the first request that is not wholly covered by the runs taken
  std::uint64_t next_page_ = 0;  // the first page of its file not covered by them
};

}  // namespace memhier
