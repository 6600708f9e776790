// Chooses the table of kernels for this CPU.

#include "kernels.h"

#include <cstring>

#ifdef QUIRE_HAS_AVXVNNI
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#ifndef HWCAP_ASIMDHP
#define HWCAP_ASIMDHP (1 << 10)
#endif
#ifndef HWCAP2_I8MM
#define HWCAP2_I8MM (1 << 13)
#endif
#endif

namespace quire {

#define QUIRE_DECLARE(isa)          \
    namespace isa_##isa {           \
        extern const Kernels table; \
    }
QUIRE_DECLARE(plain)
#ifdef QUIRE_HAS_DOTPROD
QUIRE_DECLARE(dotprod)
#endif
#ifdef QUIRE_HAS_I8MM
QUIRE_DECLARE(i8mm)
#endif
#ifdef QUIRE_HAS_AVX2
QUIRE_DECLARE(avx2)
#endif
#ifdef QUIRE_HAS_AVXVNNI
QUIRE_DECLARE(avxvnni)
#endif
#ifdef QUIRE_HAS_AVX512
QUIRE_DECLARE(avx512)
#endif

namespace {

#ifdef QUIRE_HAS_AVXVNNI
// __builtin_cpu_supports has no name for it in older compilers.
bool has_avx_vnni() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 4);
}
#endif

struct Tables {
    const Kernels* entries[4];
    const char* names[5];
    int count = 0;

    void add(const Kernels& table) {
        entries[count] = &table;
        names[count++] = table.name;
        names[count] = nullptr;
    }

    Tables() {
#ifdef QUIRE_HAS_AVX512
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vnni"))
            add(isa_avx512::table);
#endif
#ifdef QUIRE_HAS_AVX2
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
#ifdef QUIRE_HAS_AVXVNNI
            if (has_avx_vnni()) add(isa_avxvnni::table);
#endif
            add(isa_avx2::table);
        }
#endif
#ifdef QUIRE_HAS_DOTPROD
#ifdef __APPLE__
        add(isa_dotprod::table);  // every Apple arm64 CPU has it
#else
        const unsigned long caps = getauxval(AT_HWCAP);
        if ((caps & HWCAP_ASIMDDP) && (caps & HWCAP_ASIMDHP)) {
#ifdef QUIRE_HAS_I8MM
            if (getauxval(AT_HWCAP2) & HWCAP2_I8MM) add(isa_i8mm::table);
#endif
            add(isa_dotprod::table);
        }
#endif
#endif
        add(isa_plain::table);
    }
};

const Tables& tables() {
    static const Tables all;
    return all;
}

const Kernels* chosen = nullptr;

}  // namespace

const Kernels& kernels() { return chosen ? *chosen : *tables().entries[0]; }

bool use_isa(const char* name) {
    for (int i = 0; i < tables().count; ++i) {
        if (std::strcmp(tables().names[i], name) == 0) {
            chosen = tables().entries[i];
            return true;
        }
    }
    return false;
}

const char* const* available_isas() { return tables().names; }

}  // namespace quire
