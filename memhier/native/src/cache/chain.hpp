// Queues of numbered entries, linked through one shared array: an entry is in one queue at a time.
#pragma once

#include <cstdint>
#include <vector>

namespace memhier {

struct Link {
  std::uint32_t older;
  std::uint32_t newer;
};

inline void prefetch_neighbours(const std::vector<Link>& links, std::uint32_t entry) {
  const Link link = links[entry];
  // Entries at an end, or in no queue, name none or an old neighbour: then the hint is of no use, and no harm.
  if (link.older < links.size()) __builtin_prefetch(&links[link.older], 1);
  if (link.newer < links.size()) __builtin_prefetch(&links[link.newer], 1);
}

struct Chain {
  static constexpr std::uint32_t none = 0xffffffff;

  std::uint32_t oldest = none;
  std::uint32_t newest = none;

  bool empty() const { return oldest == none; }

  void append(std::vector<Link>& links, std::uint32_t entry) {
    links[entry] = {newest, none};
    if (newest == none)
      oldest = entry;
    else
      links[newest].newer = entry;
    newest = entry;
  }

  void remove(std::vector<Link>& links, std::uint32_t entry) {
    const Link link = links[entry];
    if (link.older == none)
      oldest = link.newer;
    else
      links[link.older].newer = link.newer;
    if (link.newer == none)
      newest = link.older;
    else
      links[link.newer].older = link.older;
  }
};

}  // namespace memhier
