// The table of kernels of the ISA that this file is compiled for.

#include "kernels.h"

namespace quire::QUIRE_ISA {

extern const MatrixKernels matrix_kernels;
extern const OpKernels op_kernels;
extern const SearchKernels search_kernels;
extern const ScanKernels scan_kernels;
extern const IndexKernels index_kernels;
extern const CompressKernels compress_kernels;

#define QUIRE_STRING_(x) #x
#define QUIRE_STRING(x) QUIRE_STRING_(x)

extern const Kernels table;
const Kernels table = {QUIRE_STRING(QUIRE_ISA) + sizeof("isa_") - 1,
                       matrix_kernels,
                       op_kernels,
                       search_kernels,
                       scan_kernels,
                       index_kernels,
                       compress_kernels};

}  // namespace quire::QUIRE_ISA
