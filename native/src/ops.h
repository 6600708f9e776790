// Everything in a forward pass that is not a matrix product.
#pragma once

#include <cstdint>

namespace quire {

struct OpKernels {};

}  // namespace quire
