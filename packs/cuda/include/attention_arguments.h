// What all kernels of attention are told of a record and a step's rows.
#pragma once
#include "attention.cuh"
#include "operand.h"

namespace pk {

// Of pk_op_attention or pk_op_sparse.
template <class Op>
AttentionArguments attention_arguments(const Launch &l, const Op &op) {
    const pk_state &s = *l.state;
    auto ints = [](uint64_t address) { return reinterpret_cast<const int32_t *>(address); };
    AttentionArguments a = {};
    a.q = reinterpret_cast<const void *>(op.q.data);
    a.out = reinterpret_cast<void *>(op.out.data);
    a.gains = reinterpret_cast<const float *>(op.gains.data);
    a.info = l.info;
    a.row_slot = ints(s.row_slot);
    a.row_start = ints(s.row_start);
    a.row_position = ints(s.row_position);
    a.row_flags = ints(s.row_flags);
    a.token_row = ints(s.token_row);
    a.page_table = ints(s.page_table);
    a.kv = reinterpret_cast<const uint8_t *>(s.kv);
    a.q_stride = elements_apart(op.q);
    a.out_stride = elements_apart(op.out);
    a.page_stride = s.kv_page_stride;
    a.k_offset = op.k_offset;
    a.v_offset = op.v_offset;
    a.q_format = op.q.format;
    a.out_format = op.out.format;
    a.kv_format = op.kv_format;
    a.n_heads = op.n_heads;
    a.n_kv_heads = op.n_kv_heads;
    a.head_width = op.head_width;
    a.v_width = op.v_width;
    a.page_tokens = s.page_tokens;
    a.slot_pages = s.slot_pages;
    a.scale = op.scale;
    return a;
}

}  // namespace pk
