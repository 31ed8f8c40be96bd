// Copies between pages of a reserved range and pinned memory: on a stream of their own, as if in order with the steps.
//
// They begin when the steps that were given before are done, come one after the other, and run beside later steps. A step that takes
// over a page (pk_page_write) on which a copy is under way waits for it; so do copies between device memories. Other copies from and to pinned memory
// stay on the steps' stream. All of them are counted, so that the host knows what has come.
#pragma once
#include <map>
#include <utility>
#include <vector>

#include "context.h"

namespace pk {

class Copies {
   public:
    int32_t open();
    void close();
    // A copy that pk_copy was asked for.
    int32_t give(pk_ctx &ctx, uint64_t to, uint64_t from, int64_t n_bytes);
    // Something was enqueued on the steps' stream.
    void step_given() { has_news_ = true; }
    // Copies given, and of those the ones that are done with all before them.
    int32_t count(uint64_t *given, uint64_t *done);
    // Number of the last copy on an address's page that may be under way; 0: none.
    uint64_t on(uint64_t device);
    bool is_idle() const { return given_ == done_; }
    // Copies on the steps' stream so far.
    uint64_t n_among_steps() const { return n_among_steps_; }
    // The steps' stream goes on when copy `number` is done.
    int32_t hold(pk_ctx &ctx, uint64_t number);
    // Waits until all are done.
    int32_t settle();
    // Pages that copies were made to since the last call: where they begin, and the copy's number.
    std::vector<std::pair<uint64_t, uint64_t>> take_arrivals() { return std::move(arrivals_); }

   private:
    static constexpr uint64_t kEvents = 2048;  // copies that may be under way
    int32_t update();
    cudaStream_t stream_ = nullptr;
    cudaEvent_t before_ = nullptr;
    std::vector<cudaEvent_t> events_;
    std::map<uint64_t, std::pair<uint64_t, uint64_t>> ranges_;  // of device memory under way: begin to end, number
    std::vector<std::pair<uint64_t, uint64_t>> arrivals_;
    uint64_t given_ = 0, done_ = 0, n_among_steps_ = 0;
    bool has_news_ = true;
};

Copies &copies_of(pk_ctx *ctx);

}  // namespace pk
