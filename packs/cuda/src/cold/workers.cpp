// Threads that compute experts on the host (include/cold_workers.h). The first looks at the mail and lays a job out; all take its tiles from one
// counter a part. A row's sum is made by one thread, over its experts in their order, so that it does not depend on who made what.
#include "../../include/cold_workers.h"

#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <system_error>

#include "../../../pack.h"

namespace pk {
namespace {

// Between two steps of a decode loop nobody falls asleep.
constexpr int64_t kAwakeTicks = 500'000;

void futex(std::atomic<uint32_t> *word, int what, uint32_t value) { syscall(SYS_futex, word, what, value, nullptr, nullptr, 0); }

template <class T>
T seen(const T &word) {
    return *const_cast<const volatile T *>(&word);
}

float activated(const ColdLayer &l, float gate, float up) {
    switch (l.act) {
        case PK_ACT_SILU: return gate / (1.0f + std::exp(-gate)) * up;
        case PK_ACT_GELU_TANH: return 0.5f * gate * (1.0f + std::tanh(0.7978845608028654f * (gate + 0.044715f * gate * gate * gate))) * up;
        case PK_ACT_GELU_ERF: return 0.5f * gate * (1.0f + std::erf(gate * 0.7071067811865476f)) * up;
        case PK_ACT_RELU2: return (gate > 0.0f ? gate * gate : 0.0f) * up;
        default: break;  // SWIGLU_CLAMP
    }
    gate = std::min(gate, l.limit);
    up = std::min(std::max(up, -l.limit), l.limit);
    return gate / (1.0f + std::exp(-l.alpha * gate)) * (up + 1.0f);
}

uint16_t to_bf16(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    if (v != v) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

bool has_cold_format(int32_t format) {
    return format == PK_BF16 || format == PK_FP8_E4M3 || format == PK_Q8_0 || format == PK_Q4_K || format == PK_Q6_K;
}

int64_t cold_floats(int32_t format, int64_t cols) {
    auto padded = [&](int64_t to) { return (cols + to - 1) / to * to; };
    switch (format) {
        case PK_BF16: return padded(64);
        case PK_FP8_E4M3: return padded(128);
        case PK_Q8_0: return 2 * padded(128);
        default: return padded(256) / 64 * 160;
    }
}

const ColdKernels *cold_kernels(const char **name) {
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
    if (!has_avx2) return nullptr;
    *name = has_bf16 ? "AVX-512 BF16" : has_avx512 ? "AVX-512" : "AVX2";
    return has_bf16 ? &cold_kernels_avx512_bf16() : has_avx512 ? &cold_kernels_avx512() : &cold_kernels_avx2();
}

ColdMatrix ColdLayer::matrix(int which, int32_t expert) const {
    ColdMatrix m = matrices[which];
    const int64_t further = expert * stride;
    m.data += further;
    auto shifted = [&](const float *p) { return p ? reinterpret_cast<const float *>(reinterpret_cast<const uint8_t *>(p) + further) : nullptr; };
    m.row_scales = shifted(m.row_scales);
    m.block_scales = shifted(m.block_scales);
    std::memcpy(&m.scale, m.data + scale_at[which], 4);
    return m;
}

ColdWorkers::ColdWorkers(const ColdKernels &kernels, int32_t n_threads, ColdMail *mail)
    : kernels_(kernels), mail_(mail), layers_(kColdLayers), pair_rows_(kColdPairs), pair_weights_(kColdPairs), left_(kColdPairs), taken_(mail->request) {
    items_.reserve(kColdPairs);
    // Signals belong to the threads of the program that loaded the pack.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        for (int32_t i = 0; i < n_threads; ++i) threads_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error &) {  // as many as there may be
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ColdWorkers::~ColdWorkers() {
    stop_.store(true);
    signal_.fetch_add(1);
    futex(&signal_, FUTEX_WAKE_PRIVATE, INT_MAX);
    for (auto &thread : threads_) thread.join();
}

void ColdWorkers::expect(const uint64_t *done, uint64_t seq) {
    expected_.store(seq);
    done_word_.store(done);
    wake();
}

void ColdWorkers::hold(int32_t by) {
    holds_.fetch_add(by);
    if (by > 0) wake();
}

void ColdWorkers::forget() {
    done_word_.store(nullptr);
    while (n_reading_.load() > 0) _mm_pause();
}

void ColdWorkers::wake() {
    wanted_.store(true);
    if (n_asleep_.load() == 0) return;
    signal_.fetch_add(1);
    futex(&signal_, FUTEX_WAKE_PRIVATE, INT_MAX);
}

bool ColdWorkers::is_wanted() {
    if (holds_.load() > 0) return true;
    n_reading_.fetch_add(1);
    const uint64_t *done = done_word_.load();
    const bool is_on_its_way = done && seen(*done) < expected_.load();
    n_reading_.fetch_sub(1);
    return is_on_its_way;
}

void ColdWorkers::sleep() {
    const uint32_t before = signal_.load();
    n_asleep_.fetch_add(1);
    // Who wanted something before the count was raised saw nobody asleep: look again.
    if (!is_wanted() && !stop_.load()) futex(&signal_, FUTEX_WAIT_PRIVATE, before);
    n_asleep_.fetch_sub(1);
}

void ColdWorkers::work(int32_t thread) {
    uint64_t job = 0;
    int64_t since = static_cast<int64_t>(__rdtsc());
    while (!stop_.load(std::memory_order_relaxed)) {
        bool is_new = false;
        for (int i = 0; i < 64 && !is_new; ++i) {
            if (thread == 0) take_request();
            const uint64_t now = job_.load(std::memory_order_acquire);
            is_new = now != job;
            job = now;
            if (!is_new) _mm_pause();
        }
        if (is_new) run_job(job);
        if (thread == 0) wanted_.store(is_wanted(), std::memory_order_relaxed);
        const int64_t now = static_cast<int64_t>(__rdtsc());
        if (is_new || wanted_.load(std::memory_order_relaxed)) {
            since = now;
        } else if (now - since > kAwakeTicks) {
            sleep();
            since = static_cast<int64_t>(__rdtsc());
        }
    }
}

// By the first thread: lays out what the device asks, if it asks anything.
bool ColdWorkers::take_request() {
    const uint64_t request = seen(mail_->request);
    if (request == taken_) return false;
    taken_ = request;
    std::atomic_thread_fence(std::memory_order_acquire);
    const int32_t n_pairs = mail_->n_rows * mail_->n_used;
    n_rows_ = mail_->n_rows;
    layer_ = layers_[mail_->layer];
    const ColdLayer &l = *layer_;
    items_.clear();
    int32_t order[kColdPairs], n = 0;
    for (int32_t p = 0; p < n_pairs; ++p)
        if (mail_->ids[p] >= 0) order[n++] = p;
    std::sort(order, order + n, [&](int32_t a, int32_t b) { return mail_->ids[a] != mail_->ids[b] ? mail_->ids[a] < mail_->ids[b] : a < b; });
    for (int32_t i = 0; i < n; ++i) {
        const int32_t expert = mail_->ids[order[i]];
        if (items_.empty() || items_.back().expert != expert) items_.push_back({expert, i, 0});
        ++items_.back().count;
        pair_rows_[i] = order[i] / mail_->n_used;
        pair_weights_[i] = mail_->weights[order[i]];
    }
    const ColdMatrix &up = l.matrices[1], &down = l.matrices[2];
    x_stride_ = std::max(cold_floats(up.format, up.cols), cold_floats(l.matrices[0].data ? l.matrices[0].format : up.format, up.cols));
    h_stride_ = cold_floats(down.format, down.cols);
    hidden_tiles_ = (up.rows + kColdTile - 1) / kColdTile;
    auto grow = [](std::vector<float> &v, int64_t floats) {
        if (static_cast<int64_t>(v.size()) < floats) v.resize(floats);
    };
    grow(x_, 2 * kColdRows * x_stride_);
    n_pairs_ = n;
    n_items_ = static_cast<int32_t>(items_.size());
    n_sums_ = (down.rows + kColdTile - 1) / kColdTile;
    n_products_ = l.matrices[0].data ? 2 : 1;
    grow(products_, int64_t{2} * n * hidden_tiles_ * kColdTile);
    grow(prepared_, n * h_stride_);
    const int64_t n_tiles = static_cast<int64_t>(items_.size()) * hidden_tiles_;
    if (static_cast<int64_t>(halves_.size()) < n_tiles) halves_ = std::vector<std::atomic<int32_t>>(n_tiles);
    for (int64_t i = 0; i < n_tiles; ++i) halves_[i].store(0, std::memory_order_relaxed);
    for (size_t i = 0; i < items_.size(); ++i) left_[i].store(hidden_tiles_, std::memory_order_relaxed);
    for (auto &d : done_) d.store(0, std::memory_order_relaxed);
    const int32_t n_tasks[kParts] = {n_rows_, hidden_tiles_ * n_items_ * n_products_, n_sums_};
    for (int part = 0; part < kParts; ++part) left_over_[part].store((request & 0xffffffff) << 32 | static_cast<uint32_t>(n_tasks[part]), std::memory_order_relaxed);
    job_.store(request, std::memory_order_release);
    return true;
}

// The next of a part's n tasks; -1: there is none, or the job is another one by now. How many are left stands beside the job's number: n may have been read
// while the next job was being laid out, and is right only if a task was left.
int32_t ColdWorkers::claim(Part part, uint64_t job, int32_t n) {
    uint64_t left = left_over_[part].load(std::memory_order_acquire);
    while (left >> 32 == (job & 0xffffffff) && (left & 0xffffffff) != 0)
        if (left_over_[part].compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) return n - static_cast<int32_t>(left & 0xffffffff);
    return -1;
}

bool ColdWorkers::wait_for(Part part, uint64_t job, int32_t n) const {
    while (done_[part].load(std::memory_order_acquire) < n) {
        if (job_.load(std::memory_order_acquire) != job || stop_.load(std::memory_order_relaxed)) return false;
        _mm_pause();
    }
    return job_.load(std::memory_order_acquire) == job;
}

void ColdWorkers::run_job(uint64_t job) {
    // Numbers alone before a task is claimed: when this thread comes late, the job is over and its layer may be gone.
    const int32_t n_rows = n_rows_, n_items = n_items_, n_tiles = hidden_tiles_ * n_items * n_products_, n_sums = n_sums_;
    for (int32_t t; (t = claim(kPrepare, job, n_rows)) >= 0; done_[kPrepare].fetch_add(1, std::memory_order_acq_rel)) {
        const uint16_t *x = reinterpret_cast<const uint16_t *>(reinterpret_cast<const uint8_t *>(mail_) + kColdXAt) + t * cold_stride(layer_->matrices[1].cols);
        const ColdMatrix &up = layer_->matrices[1], &gate = layer_->matrices[0];
        kernels_.prepare(up.format, x, up.cols, x_.data() + t * x_stride_);
        if (gate.data && gate.format != up.format) kernels_.prepare(gate.format, x, gate.cols, x_.data() + (kColdRows + t) * x_stride_);
    }
    if (!wait_for(kPrepare, job, n_rows)) return;
    for (int32_t t; (t = claim(kHidden, job, n_tiles)) >= 0;) make_hidden(t);
    if (!wait_for(kHidden, job, n_items)) return;
    for (int32_t t; (t = claim(kSums, job, n_sums)) >= 0;) {
        make_sums(t);
        if (done_[kSums].fetch_add(1, std::memory_order_acq_rel) + 1 < n_sums) continue;
        const_cast<ColdLayer *>(layer_)->n_computed.fetch_add(n_items, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
        *const_cast<volatile uint64_t *>(&mail_->answer) = job;
    }
}

// A tile of gate's or up's product with all pairs of an item.
void ColdWorkers::make_hidden(int32_t task) {
    const int32_t which = n_products_ == 2 ? task & 1 : 1, at = task / n_products_, tile = at % hidden_tiles_, number = at / hidden_tiles_;
    const Item item = items_[number];
    const ColdMatrix m = layer_->matrix(which, item.expert);
    const int64_t from = which == 0 && m.format != layer_->matrices[1].format ? kColdRows : 0;
    for (int32_t first = 0; first < item.count; first += kColdTogether) {
        const int32_t n = std::min(kColdTogether, item.count - first);
        const float *x[kColdTogether];
        for (int32_t i = 0; i < n; ++i) x[i] = x_.data() + (from + pair_rows_[item.first + first + i]) * x_stride_;
        float(*out)[kColdTile] = reinterpret_cast<float(*)[kColdTile]>(products_.data()) + (int64_t{which} * hidden_tiles_ + tile) * n_pairs_ + item.first + first;
        kernels_.multiply(m, tile, x, n, out);
    }
    if (halves_[at].fetch_add(1, std::memory_order_acq_rel) + 1 == n_products_) finish_tile(number, tile);
}

// Both products become hidden values, in the place of the second.
void ColdWorkers::finish_tile(int32_t number, int32_t tile) {
    const Item item = items_[number];
    for (int32_t i = 0; i < item.count; ++i) {
        float *up = products_.data() + ((int64_t{hidden_tiles_} + tile) * n_pairs_ + item.first + i) * kColdTile;
        const float *gate = up - int64_t{hidden_tiles_} * n_pairs_ * kColdTile;
        for (int r = 0; r < kColdTile; ++r) up[r] = n_products_ == 2 ? activated(*layer_, gate[r], up[r]) : activated(*layer_, up[r], 1.0f);
    }
    if (left_[number].fetch_sub(1, std::memory_order_acq_rel) == 1) finish_item(number);
}

// Hidden values as the device rounds them, prepared for the last product.
void ColdWorkers::finish_item(int32_t number) {
    const Item item = items_[number];
    const ColdMatrix &down = layer_->matrices[2];
    uint16_t rounded[kColdWidest];
    for (int32_t i = 0; i < item.count; ++i) {
        for (int32_t tile = 0; tile < hidden_tiles_; ++tile) {
            const float *from = products_.data() + ((int64_t{hidden_tiles_} + tile) * n_pairs_ + item.first + i) * kColdTile;
            for (int32_t r = 0; r < kColdTile && tile * kColdTile + r < down.cols; ++r) rounded[tile * kColdTile + r] = to_bf16(from[r]);
        }
        kernels_.prepare(down.format, rounded, down.cols, prepared_.data() + (item.first + i) * h_stride_);
    }
    done_[kHidden].fetch_add(1, std::memory_order_acq_rel);
}

void ColdWorkers::make_sums(int32_t task) {
    float sums[kColdRows][kColdTile] = {};
    for (const Item &item : items_) {
        const ColdMatrix down = layer_->matrix(2, item.expert);
        for (int32_t first = 0; first < item.count; first += kColdTogether) {
            const int32_t n = std::min(kColdTogether, item.count - first);
            float out[kColdTogether][kColdTile];
            const float *h[kColdTogether];
            for (int32_t i = 0; i < n; ++i) h[i] = prepared_.data() + (item.first + first + i) * h_stride_;
            kernels_.multiply(down, task, h, n, out);
            for (int32_t i = 0; i < n; ++i)
                for (int r = 0; r < kColdTile; ++r) sums[pair_rows_[item.first + first + i]][r] += pair_weights_[item.first + first + i] * out[i][r];
        }
    }
    float *y = reinterpret_cast<float *>(reinterpret_cast<uint8_t *>(mail_) + kColdYAt);
    const int32_t n = std::min(kColdTile, layer_->matrices[2].rows - task * kColdTile);
    for (int32_t t = 0; t < n_rows_; ++t) std::memcpy(y + t * cold_stride(layer_->matrices[2].rows) + task * kColdTile, sums[t], n * 4);
}

}  // namespace pk
