// Copies beside the steps (include/copies.h).
#include "../include/copies.h"

namespace pk {
namespace {

bool is_pinned(uint64_t address) {
    cudaPointerAttributes found = {};
    if (cudaPointerGetAttributes(&found, reinterpret_cast<const void *>(address)) != cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    return found.type == cudaMemoryTypeHost;
}

// In a range that pages lie in.
bool is_reserved(const pk_ctx &ctx, uint64_t address) {
    auto after = ctx.reserved.upper_bound(address);
    return after != ctx.reserved.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

}  // namespace

int32_t Copies::open() {
    if (int32_t e = check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "open")) return e;
    if (int32_t e = check(cudaEventCreateWithFlags(&before_, cudaEventDisableTiming), "open")) return e;
    events_.reserve(kEvents);
    return PK_OK;
}

void Copies::close() {
    settle();
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    if (before_) cudaEventDestroy(before_);
    if (stream_) cudaStreamDestroy(stream_);
    events_.clear();
    before_ = nullptr;
    stream_ = nullptr;
}

int32_t Copies::update() {
    const uint64_t before = done_;
    while (done_ < given_) {
        const cudaError_t e = cudaEventQuery(events_[(done_ + 1) % kEvents]);
        if (e == cudaErrorNotReady) break;
        if (e != cudaSuccess) return check(e, "copy");
        ++done_;
    }
    if (done_ != before)
        for (auto at = ranges_.begin(); at != ranges_.end();) at = at->second.second <= done_ ? ranges_.erase(at) : std::next(at);
    return PK_OK;
}

int32_t Copies::count(uint64_t *given, uint64_t *done) {
    if (int32_t e = update()) return e;
    *given = given_;
    *done = done_;
    return PK_OK;
}

uint64_t Copies::on(uint64_t device) {
    auto after = ranges_.upper_bound(device);
    if (after == ranges_.begin()) return 0;
    const auto &[begin, range] = *std::prev(after);
    return device < range.first ? range.second : 0;
}

int32_t Copies::hold(pk_ctx &ctx, uint64_t number) {
    if (number <= done_) return PK_OK;
    return check(cudaStreamWaitEvent(ctx.stream, events_[number % kEvents], 0), "copy");
}

int32_t Copies::settle() {
    if (is_idle()) return PK_OK;
    for (uint64_t number = done_ + 1; number <= given_; ++number)
        if (int32_t e = check(cudaEventSynchronize(events_[number % kEvents]), "copy")) return e;
    return update();
}

int32_t Copies::give(pk_ctx &ctx, uint64_t to, uint64_t from, int64_t n_bytes) {
    const bool to_host = is_pinned(to), from_host = is_pinned(from);
    const uint64_t device = to_host ? from : to;
    const bool is_beside = to_host != from_host && is_reserved(ctx, device);
    if (!is_beside && !is_idle()) {
        for (uint64_t side : {to, from})
            for (const auto &[begin, range] : ranges_)
                if (begin < side + n_bytes && side < range.first)
                    if (int32_t e = hold(ctx, range.second)) return e;
    }
    cudaStream_t stream = ctx.stream;
    if (is_beside) {
        if (has_news_) {
            if (int32_t e = check(cudaEventRecord(before_, ctx.stream), "copy")) return e;
            if (int32_t e = check(cudaStreamWaitEvent(stream_, before_, 0), "copy")) return e;
            has_news_ = false;
        }
        stream = stream_;
    }
    const uint64_t number = given_ + 1;
    cudaEvent_t event = nullptr;
    if (to_host != from_host) {
        if (given_ - done_ == kEvents) {
            if (int32_t e = check(cudaEventSynchronize(events_[(done_ + 1) % kEvents]), "copy")) return e;
            if (int32_t e = update()) return e;
        }
        while (events_.size() < kEvents) {
            cudaEvent_t made = nullptr;
            if (int32_t e = check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "copy")) return e;
            events_.push_back(made);
        }
        event = events_[number % kEvents];
    }
    if (int32_t e = check(cudaMemcpyAsync(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), n_bytes, cudaMemcpyDefault, stream), "copy")) return e;
    if (!is_beside) {
        has_news_ = true;
        ++n_among_steps_;
    }
    if (event == nullptr) return PK_OK;
    if (int32_t e = check(cudaEventRecord(event, stream), "copy")) return e;
    given_ = number;
    if (is_beside) {
        ranges_[device] = {device + n_bytes, number};
        if (from_host) arrivals_.emplace_back(device, number);
    }
    return PK_OK;
}

}  // namespace pk
