// The threads that compute experts of a step on the host, and the memory through which the device asks them. Knows no CUDA.
//
// The device writes what it asks into the mail, then `request`; the host writes the sums, then `answer`: both count up, one at a time. Threads
// look at `request` only while a step is on its way that may ask; otherwise they sleep.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "cold.h"

namespace pk {

constexpr int32_t kColdRows = 16;     // of a step that asks, at most
constexpr size_t kColdLayers = 1024;
constexpr int32_t kColdWidest = 16384;  // values of a row
constexpr int32_t kColdPairs = 1024;  // chosen experts of all its rows

// In pinned memory. Behind it: x, bf16 [n_rows, cold_stride(M)]; from kColdYAt on y, f32, likewise.
struct ColdMail {
    alignas(64) uint64_t request;
    int32_t layer, n_rows, n_used, reserved;
    alignas(64) uint64_t answer;
    alignas(64) uint64_t failed;  // the request that the device gave up waiting for; 0: none
    alignas(64) int32_t ids[kColdPairs];  // [n_rows, n_used]: the experts that are asked for, -1 elsewhere
    float weights[kColdPairs];
};
constexpr int64_t cold_stride(int64_t width) { return (width + 31) / 32 * 32; }
constexpr int64_t kColdXAt = sizeof(ColdMail), kColdYAt = kColdXAt + int64_t{kColdRows} * kColdWidest * 2, kColdMailBytes = kColdYAt + int64_t{kColdRows} * kColdWidest * 4;

// A layer's experts: matrix [0] gate, [1] up, [2] down of expert 0, the others `stride` bytes further each. Without a gate gate.data is null.
struct ColdLayer {
    ColdMatrix matrices[3];
    int64_t scale_at[3] = {}, stride = 0;
    int32_t n_experts = 0, act = 0;
    float limit = 0.0f, alpha = 0.0f;
    std::atomic<uint64_t> n_computed{0};

    ColdMatrix matrix(int which, int32_t expert) const;
};

class ColdWorkers {
   public:
    ColdWorkers(const ColdKernels &kernels, int32_t n_threads, ColdMail *mail);
    ~ColdWorkers();
    ColdWorkers(const ColdWorkers &) = delete;
    ColdWorkers &operator=(const ColdWorkers &) = delete;

    int32_t n_threads() const { return static_cast<int32_t>(threads_.size()); }
    // The layer that requests call by this number: valid until the next of that number. Nothing may be on its way.
    void set_layer(int32_t number, const ColdLayer *layer) { layers_[number] = layer; }
    // Threads look at the mail until *done >= seq, or while it is held.
    void expect(const uint64_t *done, uint64_t seq);
    void hold(int32_t by);
    // Nobody looks at that word from here on.
    void forget();

   private:
    struct Item {
        int32_t expert, first, count;
    };
    // A job's parts: rows of x are prepared, then hidden values made (tiles of gate and of up), then sums.
    enum Part { kPrepare, kHidden, kSums, kParts };

    void work(int32_t thread);
    void sleep();
    void wake();
    bool is_wanted();
    bool take_request();
    void run_job(uint64_t job);
    int32_t claim(Part part, uint64_t job, int32_t n);
    bool wait_for(Part part, uint64_t job, int32_t n) const;
    void make_hidden(int32_t task);
    void finish_tile(int32_t item, int32_t tile);
    void finish_item(int32_t item);
    void make_sums(int32_t task);

    const ColdKernels &kernels_;
    ColdMail *mail_;
    std::vector<const ColdLayer *> layers_;
    // Of the job: items in the order of experts, their pairs (row and weight), prepared rows.
    const ColdLayer *layer_ = nullptr;
    std::vector<Item> items_;
    std::vector<int32_t> pair_rows_;
    std::vector<float> pair_weights_, x_, products_, prepared_;  // products: of gate, then of up, a tile of all pairs after the other
    std::vector<std::atomic<int32_t>> left_;         // tiles of an item that are still to be made
    std::vector<std::atomic<int32_t>> halves_;       // of a tile: whether its first product is there
    int64_t x_stride_ = 0, h_stride_ = 0;
    int32_t n_rows_ = 0, n_pairs_ = 0, n_items_ = 0, hidden_tiles_ = 0, n_products_ = 0, n_sums_ = 0;
    uint64_t taken_;  // the last request that was laid out

    alignas(64) std::atomic<uint64_t> job_{0};
    alignas(64) std::atomic<uint64_t> left_over_[kParts] = {};  // the job's number, then how many tasks of the part nobody has taken
    alignas(64) std::atomic<int32_t> done_[kParts] = {};
    alignas(64) std::atomic<uint32_t> signal_{0};
    std::atomic<int32_t> n_asleep_{0}, holds_{0}, n_reading_{0};
    std::atomic<bool> stop_{false}, wanted_{false};  // wanted: as the first thread saw it last
    std::atomic<const uint64_t *> done_word_{nullptr};
    std::atomic<uint64_t> expected_{0};
    std::vector<std::thread> threads_;
};

}  // namespace pk
