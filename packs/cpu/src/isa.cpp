// Proof of instruction levels in child processes: processor flags have been wrong (hypervisors, faulty emulation), and a
// wrong flag would kill the whole program with SIGILL.
#include "isa.h"

#include <cpuid.h>
#include <immintrin.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <mutex>

namespace pk {
namespace {

constexpr int kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;  // Linux, arch/x86/include/uapi/asm/prctl.h
constexpr int kProofTimeoutMs = 5000;

bool request_amx() { return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0; }

bool flags_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("f16c") && __builtin_cpu_supports("lzcnt") && __builtin_cpu_supports("popcnt");
}

bool flags_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni");
}

bool flags_amx() {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("amx-tile") &&
           __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16");
}

__attribute__((target("avx2,fma,f16c,bmi2"))) bool proof_avx2() {
    volatile float one = 1.5f;
    __m256 a = _mm256_set1_ps(one);
    __m256 b = _mm256_cvtph_ps(_mm256_cvtps_ph(_mm256_fmadd_ps(a, a, a), 0));  // 1.5 * 1.5 + 1.5 = 3.75
    __m256i c = _mm256_sllv_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(b, _mm256_set1_ps(4))), _mm256_set1_epi32(1));
    return _mm256_extract_epi32(c, 7) == 30 && _pext_u64(0xF0F0, 0xFF00) == 0xF0;
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))) bool proof_avx512() {
    volatile int8_t two = 2;
    __m512i a = _mm512_set1_epi8(two);
    __m512i sum = _mm512_dpbusd_epi32(_mm512_set1_epi32(1), a, _mm512_set1_epi8(-3));  // 1 - 4 * 6 = -23
    __mmask64 same = _mm512_cmpeq_epi8_mask(a, _mm512_set1_epi8(2));
    __m512 f = _mm512_and_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(-23));
    return same == ~0ull && _mm512_reduce_add_ps(f) == -23.0f * 16 && _mm256_movemask_epi8(_mm512_castsi512_si256(a)) == 0;
}

__attribute__((target("avx512f,avx512bw,avx512bf16,avx512vbmi,amx-tile,amx-int8,amx-bf16"))) bool proof_amx() {
    if (!request_amx()) return false;
    alignas(64) static uint8_t config[64];
    alignas(64) static int8_t a[16][64], b[16][64];
    alignas(64) static int32_t sums[16][16];
    alignas(64) static float products[16][16];
    config[0] = 1;
    for (int tile = 0; tile < 3; ++tile) {
        config[16 + 2 * tile] = 64;
        config[48 + tile] = 16;
    }
    std::memset(a, 3, sizeof a);
    std::memset(b, -2, sizeof b);
    // gcc's tile instructions do not say that they read memory: without these fences the stores above could come later.
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(config);
    _tile_zero(0);
    _tile_loadd(1, a, 64);
    _tile_loadd(2, b, 64);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, sums, 64);
    auto *halves = reinterpret_cast<uint16_t *>(a);
    for (int i = 0; i < 512; ++i) halves[i] = 0x3FC0;  // 1.5 in bf16
    __asm__ volatile("" ::: "memory");
    _tile_zero(0);
    _tile_loadd(1, a, 64);
    _tile_loadd(2, a, 64);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, products, 64);
    _tile_release();
    __m512i bytes = _mm512_permutexvar_epi8(_mm512_set1_epi8(1), _mm512_set1_epi8(5));
    __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1.5f), _mm512_set1_ps(1.5f));
    uint16_t first;
    std::memcpy(&first, &rounded, 2);
    return sums[15][15] == 64 * -6 && products[15][15] == 32 * 2.25f && _mm512_reduce_max_epi32(bytes) == 0x05050505 && first == 0x3FC0;
}

// Runs `proof` in a child. True when it answered yes; a signal, a wrong answer or silence is no.
bool proved(bool (*proof)()) {
    int ends[2];
    if (pipe(ends) != 0) return false;
    pid_t child = fork();
    if (child < 0) {
        close(ends[0]);
        close(ends[1]);
        return false;
    }
    if (child == 0) {
        for (int s : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP, SIGTERM}) signal(s, SIG_DFL);
        char answer = proof() ? 1 : 0;
        ssize_t written = write(ends[1], &answer, 1);
        _exit(written == 1 ? 0 : 1);
    }
    close(ends[1]);
    pollfd waiting{ends[0], POLLIN, 0};
    char answer = 0;
    int ready;
    do ready = poll(&waiting, 1, kProofTimeoutMs);
    while (ready < 0 && errno == EINTR);
    if (ready <= 0 || read(ends[0], &answer, 1) != 1) answer = 0;
    close(ends[0]);
    if (ready <= 0) kill(child, SIGKILL);
    while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
    return answer == 1;
}

int32_t prove_all() {
    __builtin_cpu_init();
    if (!flags_avx2() || !proved(proof_avx2)) return 0;
    if (!flags_avx512() || !proved(proof_avx512)) return 1;
    // Permission is per process: the child's does not count for this one.
    if (!flags_amx() || !proved(proof_amx) || !request_amx()) return 2;
    return 3;
}

}  // namespace

int32_t proved_isa(int32_t max_isa) {
    static const int32_t highest = prove_all();
    return max_isa > 0 && max_isa < highest ? max_isa : highest;
}

const char *arch_name(Isa isa) {
    switch (isa) {
        case Isa::kAmx: return "cpu:avx512-vnni-amx";
        case Isa::kAvx512: return "cpu:avx512-vnni";
        default: return "cpu:avx2";
    }
}

void processor_name(char *out, int32_t n) {
    unsigned words[12] = {};
    for (unsigned i = 0; i < 3; ++i) __get_cpuid(0x80000002 + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2], &words[4 * i + 3]);
    char text[49] = {};
    std::memcpy(text, words, 48);
    const char *start = text;
    while (*start == ' ') ++start;
    std::strncpy(out, *start ? start : "x86-64 processor", n - 1);
    out[n - 1] = 0;
}

}  // namespace pk
