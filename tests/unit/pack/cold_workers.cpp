// The threads of packs/cuda/src/cold/workers.cpp with products of the test's own: jobs of changing sizes, one after the other at once, must give
// one thread's sums bit for bit. Built with -fsanitize=address it also tells of a thread that is late and works on a job that is over.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "packs/cuda/include/cold_workers.h"
#include "packs/pack.h"

namespace pk {
namespace {

void prepare(int32_t, const uint16_t *x, int32_t cols, float *out) {
    for (int32_t i = 0; i < cols; ++i) out[i] = static_cast<float>(x[i] & 255) / 256;
}
void multiply(const ColdMatrix &m, int32_t tile, const float *const *x, int32_t n, float (*out)[kColdTile]) {
    for (int32_t i = 0; i < n; ++i)
        for (int32_t r = 0; r < kColdTile; ++r) out[i][r] = x[i][(tile * kColdTile + r) % m.cols] * 0.5f + static_cast<float>(m.data[0]) / 64;
}
const ColdKernels kernels = {prepare, multiply};

}  // namespace
const ColdKernels &cold_kernels_avx2() { return kernels; }
const ColdKernels &cold_kernels_avx512() { return kernels; }
const ColdKernels &cold_kernels_avx512_bf16() { return kernels; }
}  // namespace pk

using namespace pk;

static std::vector<float> answers(int n_threads, int n_asks) {
    constexpr int kWidth = 16, kHidden = 48, kExperts = 12, kStride = 256;
    static std::vector<uint8_t> data(kStride * kExperts);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i * 31 % 61);
    std::vector<uint64_t> memory((kColdMailBytes + 7) / 8 + 8);
    auto *mail = reinterpret_cast<ColdMail *>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    ColdLayer layer;
    const int rows[3] = {kHidden, kHidden, kWidth}, cols[3] = {kWidth, kWidth, kHidden};
    for (int i = 0; i < 3; ++i) {
        layer.matrices[i].data = data.data() + 16 * i;
        layer.matrices[i].format = PK_BF16;
        layer.matrices[i].rows = rows[i];
        layer.matrices[i].cols = cols[i];
        layer.scale_at[i] = 8;
    }
    layer.stride = kStride;
    layer.n_experts = kExperts;
    layer.act = PK_ACT_SILU;
    ColdWorkers workers(kernels, n_threads, mail);
    workers.set_layer(0, &layer);
    workers.hold(1);
    std::mt19937 random(7);
    std::vector<float> found;
    for (int ask = 0; ask < n_asks; ++ask) {
        mail->n_rows = 1 + static_cast<int>(random() % kColdRows);
        mail->n_used = 1 + static_cast<int>(random() % 6);
        for (int p = 0; p < mail->n_rows * mail->n_used; ++p) {
            mail->ids[p] = static_cast<int>(random() % (kExperts + 1)) - 1;
            mail->weights[p] = static_cast<float>(random() % 16) / 16;
        }
        auto *x = reinterpret_cast<uint16_t *>(reinterpret_cast<uint8_t *>(mail) + kColdXAt);
        for (int i = 0; i < mail->n_rows * kWidth; ++i) x[i] = static_cast<uint16_t>(random());
        const uint64_t request = mail->request + 1;
        std::atomic_thread_fence(std::memory_order_seq_cst);
        *const_cast<volatile uint64_t *>(&mail->request) = request;
        while (*const_cast<volatile uint64_t *>(&mail->answer) != request) std::this_thread::yield();
        std::atomic_thread_fence(std::memory_order_acquire);
        const auto *y = reinterpret_cast<const float *>(reinterpret_cast<const uint8_t *>(mail) + kColdYAt);
        found.insert(found.end(), y, y + mail->n_rows * kWidth);
    }
    workers.hold(-1);
    return found;
}

int main(int, char **argv) {
    const int n_threads = std::atoi(argv[1]), n_asks = std::atoi(argv[2]), n_rounds = std::atoi(argv[3]);
    const std::vector<float> alone = answers(1, n_asks);
    for (int round = 0; round < n_rounds; ++round) {
        const std::vector<float> together = answers(n_threads, n_asks);
        if (std::memcmp(alone.data(), together.data(), alone.size() * sizeof(float)) != 0) {
            std::puts("differs");
            return 1;
        }
    }
    std::printf("%zu sums, the same\n", alone.size());
}
