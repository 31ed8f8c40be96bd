// An open context, whole: what the C API and parts know of it beside what launches do.
#pragma once
#include <map>
#include <memory>
#include <utility>

#include "../include/copies.h"
#include "../include/repack.cuh"
#include "../include/slot_pages.h"

namespace pk {

struct Parting;

struct FullContext : pk_ctx {
    RepackBuffers repacking;
    cudaDeviceProp properties = {};
    bool is_invariant = false;
    Copies copies;
    FullContext *of = nullptr;           // what a part, or a rest, was parted from: weights, copies and slots are its
    cudaStream_t questions = nullptr;    // of a part or a rest
    std::unique_ptr<Parting> parting;    // of a context that was parted
    std::map<std::pair<const void *, int>, int> clusters;       // that run at once, by kernel and blocks
    std::map<uint64_t, std::weak_ptr<SlotPages>> slots;         // by page table
    FullContext();
    ~FullContext();
};

inline FullContext &full(pk_ctx *ctx) { return *static_cast<FullContext *>(ctx); }
inline const FullContext &full(const pk_ctx *ctx) { return *static_cast<const FullContext *>(ctx); }
inline FullContext &whole(pk_ctx *ctx) { return full(ctx).of ? *full(ctx).of : full(ctx); }

// When a context closes: its part and its rest, or what a part has of its own.
void drop_parts(FullContext &ctx);

}  // namespace pk
