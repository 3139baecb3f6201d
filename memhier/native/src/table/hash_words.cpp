// XXH64 of words with seed 0, after Yann Collet's specification (xxHash, doc/xxhash_spec.md).
#include <bit>
#include <cstdint>
#include <cstring>

#include "bind/array.hpp"
#include "bind/module.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

constexpr std::uint64_t kPrime1 = 0x9e3779b185ebca87u, kPrime2 = 0xc2b2ae3d27d4eb4fu, kPrime3 = 0x165667b19e3779f9u,
                        kPrime4 = 0x85ebca77c2b2ae63u, kPrime5 = 0x27d4eb2f165667c5u;

template <class T>
std::uint64_t read(const std::uint8_t* at) {
  T word;
  std::memcpy(&word, at, sizeof(T));
  return word;
}

std::uint64_t round(std::uint64_t held, std::uint64_t word) { return std::rotl(held + word * kPrime2, 31) * kPrime1; }

std::uint64_t hash(const std::uint8_t* at, std::size_t length) {
  const std::uint8_t* end = at + length;
  std::uint64_t held = kPrime5;
  if (length >= 32) {
    std::uint64_t lanes[] = {kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1};
    for (; end - at >= 32; at += 32) {
      for (std::size_t lane = 0; lane < 4; ++lane) lanes[lane] = round(lanes[lane], read<std::uint64_t>(at + 8 * lane));
    }
    held = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
    for (const std::uint64_t lane : lanes) held = (held ^ round(0, lane)) * kPrime1 + kPrime4;
  }
  held += length;
  for (; end - at >= 8; at += 8) held = std::rotl(held ^ round(0, read<std::uint64_t>(at)), 27) * kPrime1 + kPrime4;
  if (end - at >= 4) {
    held = std::rotl(held ^ (read<std::uint32_t>(at) * kPrime1), 23) * kPrime2 + kPrime3;
    at += 4;
  }
  for (; at != end; ++at) held = std::rotl(held ^ (*at * kPrime5), 11) * kPrime1;
  held = (held ^ (held >> 33)) * kPrime2;
  held = (held ^ (held >> 29)) * kPrime3;
  return held ^ (held >> 32);
}

void hash_words(const Array<const std::uint8_t, 1>& words, const Array<const std::int64_t, 1>& ends,
                const Array<std::int64_t, 1>& hashes) {
  require(ends.size() == hashes.size(), "ends, hashes: as many");
  nb::gil_scoped_release released;
  std::size_t from = 0;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const auto to = static_cast<std::size_t>(ends[i]);
    require(from <= to && to <= words.size(), "ends: rising, up to the number of bytes");
    hashes[i] = static_cast<std::int64_t>(hash(words.data() + from, to - from));
    from = to;
  }
}

}  // namespace
}  // namespace memhier

void register_hash_words(nb::module_& m) {
  using namespace nb::literals;
  m.def("hash_words", &memhier::hash_words, nb::kw_only(), "words"_a, "ends"_a, "hashes"_a);
}
