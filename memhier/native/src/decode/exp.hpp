// exp in single precision, for loops that a compiler vectorises.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "bind/simd.hpp"

namespace memhier {

// exp to a millionth of it for x up to 80; exactly zero below -80, where nothing counts.
MEMHIER_INLINE float exp_of(float x) {
  constexpr float kMagic = 12582912;  // 1.5 * 2^23: adding it leaves the rounded value in the low bits
  const float bounded = std::max(x, -80.F);
  const float shifted = bounded * 1.44269504F + kMagic;
  const float whole = shifted - kMagic;
  const float rest = (bounded - whole * 0.693145752F) - whole * 1.42860677e-6F;
  float power = 1.38888889e-3F;
  power = power * rest + 8.33333333e-3F;
  power = power * rest + 4.16666667e-2F;
  power = power * rest + 1.66666667e-1F;
  power = power * rest + 0.5F;
  power = power * rest + 1;
  power = power * rest + 1;
  const auto exponent =
      static_cast<std::uint32_t>(std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kMagic));
  const float scaled = std::bit_cast<float>(std::bit_cast<std::uint32_t>(power) + (exponent << 23));
  return x < -80 ? 0 : scaled;
}

}  // namespace memhier
