// What this machine can do at most, as one line of JSON: GB/s of reading memory, and operations per second of each kind of
// product, with N threads. Usage: ceilings N MEBIBYTES. Built and run by bench/kernels.py with the compiler that built the pack.
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

std::atomic<float> sink;

double seconds_of(int n_threads, const std::function<void(int)> &body) {
    double best = 1e30;
    for (int repeat = 0; repeat < 7; ++repeat) {
        auto start = std::chrono::steady_clock::now();
        std::vector<std::thread> threads;
        for (int i = 1; i < n_threads; ++i) threads.emplace_back(body, i);
        body(0);
        for (auto &thread : threads) thread.join();
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
}

__attribute__((target("avx2"))) void read_all(const float *p, size_t n) {
    __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
    for (size_t i = 0; i + 32 <= n; i += 32) {
        a = _mm256_add_ps(a, _mm256_loadu_ps(p + i));
        b = _mm256_add_ps(b, _mm256_loadu_ps(p + i + 8));
        c = _mm256_add_ps(c, _mm256_loadu_ps(p + i + 16));
        d = _mm256_add_ps(d, _mm256_loadu_ps(p + i + 24));
    }
    sink = _mm256_cvtss_f32(_mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d)));
}

constexpr int64_t kRounds = 4'000'000;

__attribute__((target("avx2,fma"))) void fma_avx2() {
    __m256 s[12], x = _mm256_set1_ps(1e-9f);
    for (auto &v : s) v = x;
    for (int64_t i = 0; i < kRounds; ++i)
#pragma GCC unroll 12
        for (int j = 0; j < 12; ++j) s[j] = _mm256_fmadd_ps(x, x, s[j]);
    for (auto &v : s) x = _mm256_add_ps(x, v);
    sink = _mm256_cvtss_f32(x);
}

__attribute__((target("avx512f"))) void fma_avx512() {
    __m512 s[12], x = _mm512_set1_ps(1e-9f);
    for (auto &v : s) v = x;
    for (int64_t i = 0; i < kRounds; ++i)
#pragma GCC unroll 12
        for (int j = 0; j < 12; ++j) s[j] = _mm512_fmadd_ps(x, x, s[j]);
    for (auto &v : s) x = _mm512_add_ps(x, v);
    sink = _mm512_cvtss_f32(x);
}

__attribute__((target("amx-tile,amx-bf16,amx-int8"))) void tiles(bool is_int8) {
    alignas(64) static constexpr unsigned char kConfig[64] = {1,  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,
                                                               0,  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16};
    _tile_loadconfig(kConfig);
    for (int64_t i = 0; i < kRounds / 8; ++i) {
        if (is_int8) {
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_release();
}

}  // namespace

int main(int argc, char **argv) {
    int n_threads = argc > 1 ? std::atoi(argv[1]) : 1;
    size_t n_bytes = size_t(argc > 2 ? std::atoi(argv[2]) : 256) << 20, share = n_bytes / 4 / n_threads;
    auto *memory = static_cast<float *>(mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (memory == MAP_FAILED) return 1;
    madvise(memory, n_bytes, MADV_HUGEPAGE);
    std::memset(memory, 0, n_bytes);
    double read = n_bytes / seconds_of(n_threads, [&](int i) { read_all(memory + i * share, share); }) / 1e9;
    __builtin_cpu_init();
    bool has_512 = __builtin_cpu_supports("avx512f");
    double lanes = has_512 ? 16 : 8;
    double fma = n_threads * kRounds * 12 * 2 * lanes / seconds_of(n_threads, [&](int) { has_512 ? fma_avx512() : fma_avx2(); }) / 1e9;
    double bf16 = 0, int8 = 0;
    if (__builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") && syscall(SYS_arch_prctl, 0x1023, 18) == 0) {
        double products = double(n_threads) * (kRounds / 8) * 4;
        bf16 = products * 16 * 16 * 32 * 2 / seconds_of(n_threads, [](int) { tiles(false); }) / 1e9;
        int8 = products * 16 * 16 * 64 * 2 / seconds_of(n_threads, [](int) { tiles(true); }) / 1e9;
    }
    std::printf("{\"read_gbs\": %.2f, \"f32_gflops\": %.1f, \"bf16_gflops\": %.1f, \"int8_gops\": %.1f}\n", read, fma, bf16, int8);
    return 0;
}
