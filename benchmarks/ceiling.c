// Peak rates of this machine, with all threads together: memory bandwidth, and int8 multiply-adds.
//
//     cc -O3 -march=native -pthread benchmarks/ceiling.c -o ceiling && ./ceiling 2
//
// Prints "<GB/s> <billion multiply-adds/s> <instruction>"; the second is 0 if no int8 dot product instruction is
// available.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__ARM_NEON)
#include <arm_neon.h>
#define IN_REGISTER(x) "+w"(x)
#elif defined(__AVX2__)
#include <immintrin.h>
#define IN_REGISTER(x) "+v"(x)
#endif

#define BYTES (256u << 20)  // for each thread: larger than any cache
#define ROUNDS 30000000L    // of one instruction per chain: about 0.1 s
#define REPEATS 20          // the best one counts
#define MAX_THREADS 1024

// Independent sums: enough to hide the latency, few enough for 16 registers.
#define CHAINS 12
#define EACH_CHAIN(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)

// The operands and sums of one instruction, and its number of multiply-adds.
#if defined(__ARM_FEATURE_MATMUL_INT8)
typedef int8x16_t Bytes;
typedef int32x4_t Sums;
#define MULTIPLY_ADD(sums, a, b) sums = vmmlaq_s32(sums, a, b)
#define WIDTH 32
#define NAME "smmla"
#elif defined(__ARM_FEATURE_DOTPROD)
typedef int8x16_t Bytes;
typedef int32x4_t Sums;
#define MULTIPLY_ADD(sums, a, b) sums = vdotq_s32(sums, a, b)
#define WIDTH 16
#define NAME "sdot"
#elif defined(__AVX512VNNI__)
typedef __m512i Bytes;
typedef __m512i Sums;
// Inline assembly: compilers would copy the sums before the instruction overwrites them, which takes half of the time.
#define MULTIPLY_ADD(sums, a, b) __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b))
#define WIDTH 64
#define NAME "vpdpbusd zmm"
#elif defined(__AVXVNNI__)
typedef __m256i Bytes;
typedef __m256i Sums;
#define MULTIPLY_ADD(sums, a, b) __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b))
#define WIDTH 32
#define NAME "vpdpbusd ymm"
#elif defined(__AVX2__)
typedef __m256i Bytes;
typedef __m256i Sums;
#define MULTIPLY_ADD(sums, a, b) \
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)))
#define WIDTH 32
#define NAME "vpmaddubsw ymm"
#endif

typedef uint64_t Line __attribute__((vector_size(64)));

static pthread_barrier_t start_line, finish_line;
static volatile uint64_t sink;  // results go here, so that nothing is optimized away

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void read_all(const Line* lines) {
    Line sums[4] = {{0}};
    for (size_t i = 0; i < BYTES / sizeof(Line); i += 4)
        for (int j = 0; j < 4; j++) sums[j] += lines[i + j];
    sink += sums[0][0] + sums[1][1] + sums[2][2] + sums[3][3];
}

static void multiply_all(void) {
#ifdef NAME
    Bytes ones;
    memset(&ones, 1, sizeof ones);
    Bytes a = ones, b = ones;  // their addresses are not taken: they stay in registers
#define ZERO(j) Sums sums##j = {0};
#define STEP(j)                                                                                             \
    __asm__ volatile("" : IN_REGISTER(sums##j), IN_REGISTER(a)); /* opaque to the optimizer              */ \
    MULTIPLY_ADD(sums##j, a, b);
#define KEEP(j) sink += (uint64_t)sums##j[0];
    EACH_CHAIN(ZERO)
    for (long i = 0; i < ROUNDS; i++) {
        EACH_CHAIN(STEP)
    }
    EACH_CHAIN(KEEP)
#endif
}

static double begins[MAX_THREADS], ends[MAX_THREADS];

static void* work(void* argument) {
    const size_t thread = (size_t)argument;
    Line* lines = aligned_alloc(4096, BYTES);
    if (!lines) abort();
    memset(lines, 1, BYTES);  // private pages, near its core
    for (int repeat = 0; repeat < 2 * REPEATS; repeat++) {
        pthread_barrier_wait(&start_line);
        begins[thread] = now();
        if (repeat < REPEATS)
            read_all(lines);
        else
            multiply_all();
        ends[thread] = now();
        pthread_barrier_wait(&finish_line);
    }
    free(lines);
    return NULL;
}

// From the first start to the last end of a thread.
static double seconds_of_all(int num_threads) {
    double begin = begins[0], end = ends[0];
    for (int i = 1; i < num_threads; i++) {
        if (begins[i] < begin) begin = begins[i];
        if (ends[i] > end) end = ends[i];
    }
    return end - begin;
}

int main(int argc, char** argv) {
    const int num_threads = argc == 2 ? atoi(argv[1]) : 0;
    if (num_threads < 1 || num_threads > MAX_THREADS) {
        fprintf(stderr, "usage: ceiling THREADS\n");
        return 2;
    }
    pthread_t threads[MAX_THREADS];
    pthread_barrier_init(&start_line, NULL, num_threads + 1);
    pthread_barrier_init(&finish_line, NULL, num_threads + 1);
    for (size_t i = 0; i < (size_t)num_threads; i++)
        if (pthread_create(&threads[i], NULL, work, (void*)i)) abort();
    double best[2] = {1e9, 1e9};  // seconds of reading, of multiplying
    for (int repeat = 0; repeat < 2 * REPEATS; repeat++) {
        pthread_barrier_wait(&start_line);
        pthread_barrier_wait(&finish_line);
        const double seconds = seconds_of_all(num_threads);
        if (seconds < best[repeat / REPEATS]) best[repeat / REPEATS] = seconds;
    }
    for (int i = 0; i < num_threads; i++) pthread_join(threads[i], NULL);
    const double gigabytes = num_threads * (double)BYTES / 1e9;
#ifdef NAME
    const double products = num_threads * (double)ROUNDS * CHAINS * WIDTH / 1e9;
    printf("%.2f %.2f %s\n", gigabytes / best[0], products / best[1], NAME);
#else
    printf("%.2f 0 none\n", gigabytes / best[0]);
#endif
    return 0;
}
