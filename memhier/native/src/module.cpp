#include "module.hpp"

NB_MODULE(_core, m) {
  m.doc() = "memhier's compiled core: batched page reads and the kernels that follow them.";
}
