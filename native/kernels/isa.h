// QUIRE_ISA is a name. QUIRE_ISA_ID is a number for it, which #if can compare.
#pragma once

#define QUIRE_ISA_ID_isa_plain 0
#define QUIRE_ISA_ID_isa_dotprod 1
#define QUIRE_ISA_ID_isa_avx2 2
#define QUIRE_ISA_ID_isa_avx512 3
#define QUIRE_ISA_ID_isa_avxvnni 4
#define QUIRE_ISA_ID_isa_i8mm 5
#define QUIRE_JOIN_(a, b) a##b
#define QUIRE_JOIN(a, b) QUIRE_JOIN_(a, b)
#define QUIRE_ISA_ID QUIRE_JOIN(QUIRE_ISA_ID_, QUIRE_ISA)
#define QUIRE_NEON (QUIRE_ISA_ID == 1 || QUIRE_ISA_ID == 5)
