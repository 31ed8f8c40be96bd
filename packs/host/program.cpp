// Reading records.
#include "program.h"

#include <cstdio>
#include <cstring>

#include "../rare.h"
#include "error.h"

namespace pk {
namespace {

struct Known {
    int32_t op;
    int32_t size;
    const char *name;
};

constexpr Known kKnown[] = {
    {PK_OP_PREPARE, sizeof(pk_op_prepare), "prepare"}, {PK_OP_EMBED, sizeof(pk_op_embed), "embed"},
    {PK_OP_NORM, sizeof(pk_op_norm), "norm"},          {PK_OP_MATMUL, sizeof(pk_op_matmul), "matmul"},
    {PK_OP_QKV, sizeof(pk_op_qkv), "qkv"},             {PK_OP_ATTENTION, sizeof(pk_op_attention), "attention"},
    {PK_OP_GATE, sizeof(pk_op_gate), "gate"},          {PK_OP_GATHER, sizeof(pk_op_gather), "gather"},
    {PK_OP_SAMPLE, sizeof(pk_op_sample), "sample"},    {PK_OP_COMMIT, sizeof(pk_op_commit), "commit"},
    {PK_OP_COPY, sizeof(pk_op_copy), "copy"},          {PK_OP_ADD, sizeof(pk_op_add), "add"},
    {PK_OP_ROUTE, sizeof(pk_op_route), "route"},       {PK_OP_EXPERTS, sizeof(pk_op_experts), "experts"},
    {PK_OP_SIGMOID, sizeof(pk_op_sigmoid), "sigmoid"}, {PK_OP_DELTA, sizeof(pk_op_delta), "delta"},
    {PK_OP_CONV, sizeof(pk_op_conv), "conv"},       {PK_OP_MAMBA, sizeof(pk_op_mamba), "mamba"},
    {PK_OP_SOFTPLUS, sizeof(pk_op_softplus), "softplus"}, {PK_OP_WEIGH, sizeof(pk_op_weigh), "weigh"},
    {PK_OP_NGRAM, sizeof(pk_op_ngram), "ngram"},          {PK_OP_STREAMS, sizeof(pk_op_streams), "streams"},
    {PK_OP_DILATED, sizeof(pk_op_dilated), "dilated"},    {PK_OP_SPARSE, sizeof(pk_op_sparse), "sparse"},
    {PK_OP_DELTA_SIGMOID, sizeof(pk_op_delta), "delta_sigmoid"}, {PK_OP_KEEP, sizeof(pk_op_keep), "keep"},
    {PK_OP_SETTLE, sizeof(pk_op_settle), "settle"},           {PK_OP_SHIFT, sizeof(pk_op_shift), "shift"},
    {PK_OP_GUESS, sizeof(pk_op_guess), "guess"},
    {PK_OP_SETTLE_MAMBA, sizeof(pk_op_settle_mamba), "settle_mamba"},
    {PK_OP_SETTLE_CONV, sizeof(pk_op_settle_conv), "settle_conv"},
    {PK_OP_EXPERTS_FETCHED, sizeof(pk_op_experts_fetched), "experts_fetched"},
    {PK_OP_POOL, sizeof(pk_op_pool), "pool"},
};

const Known *find(int32_t op) {
    for (const Known &known : kKnown)
        if (known.op == op) return &known;
    return nullptr;
}

}  // namespace

const char *op_name(int32_t op) {
    const Known *known = find(op);
    return known ? known->name : "unknown op";
}

const char *op_names_json(bool (*has)(int32_t)) {
    static thread_local char text[1024];
    int64_t at = std::snprintf(text, sizeof text, "[");
    for (const Known &known : kKnown)
        if (known.op <= PK_OP_ADD || (has && has(known.op)))
            at += std::snprintf(text + at, sizeof text - at, "%s\"%s\"", at > 1 ? ", " : "", known.name);
    std::snprintf(text + at, sizeof text - at, "]");
    return text;
}

int32_t Records::read(const void *records, int64_t n_bytes) {
    words_.clear();
    starts_.clear();
    if (n_bytes < 0 || (n_bytes > 0 && !records)) return fail(PK_BAD_ARG, "program: %lld bytes of records at address 0", static_cast<long long>(n_bytes));
    if (n_bytes % 8) return fail(PK_BAD_ARG, "program: %lld bytes of records are not a multiple of 8", static_cast<long long>(n_bytes));
    words_.resize(n_bytes / 8);
    if (n_bytes) std::memcpy(words_.data(), records, n_bytes);
    for (int64_t at = 0; at < n_bytes;) {
        const auto *record = reinterpret_cast<const Record *>(words_.data() + at / 8);
        long long index = n();
        const Known *known = find(record->op);
        if (!known) return fail(PK_BAD_ARG, "op %lld: this pack has no op number %d", index, record->op);
        if (record->size != known->size)
            return fail(PK_BAD_ARG, "op %lld (%s): size is %d, the record has %d bytes", index, known->name, record->size, known->size);
        if (at + record->size > n_bytes)
            return fail(PK_BAD_ARG, "op %lld (%s): needs %d bytes, %lld are left", index, known->name, record->size, static_cast<long long>(n_bytes - at));
        starts_.push_back(at / 8);
        at += record->size;
    }
    return PK_OK;
}

}  // namespace pk
