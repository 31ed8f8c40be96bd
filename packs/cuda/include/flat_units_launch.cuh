// Launches of the flat kernel for block formats (flat_units.cuh): how its warps are dealt out.
#pragma once
#include "flat_units.cuh"

namespace pk {

// What weights lack in registers (skinny_parts.cuh).
template <int kFormat>
constexpr float unit_factor() {
    using U = Unit<kFormat>;
    return U::kCode == Code::kSigned8 || (U::kCode == Code::kUnsigned && U::kLow == 4 && (U::kScale == Scale::kBytesMin || U::kScale == Scale::kSigned16 || U::kScale == Scale::kHalf)) ? 0x1p20f : 1.0f;
}

constexpr int kUnitShared = 223 << 10;  // of rings; 1 kB aligns them

template <int kFormat, int kNT, int kSplit>
int32_t launch_flat_units(const Launch &l, SkinnyArguments a, const Packed *const *packed, const FlatPackets &packets) {
    using S = UnitsShape<kFormat, kNT>;
    using U = Unit<kFormat>;
    UnitsDeal deal = {};
    deal.packets = packets;
    deal.n_units = static_cast<int32_t>(packed[0]->padded_cols / U::kU);
    for (int i = 0; i < a.n_w; ++i) {
        deal.first_pair[i] = deal.n_pairs;
        a.w[i].scale *= unit_factor<kFormat>();
        if (kSplit != kTileGated || i == 0) deal.n_pairs += kSplit == kTileGated ? (a.w[i].rows + 15) / 16 : (a.w[i].rows + 31) / 32;
    }
    constexpr int halves = kSplit == kTileWhole ? 1 : 2;
    // Of the ways to lay warps along pairs and along K, the one with the fewest steps.
    int64_t best = INT64_MAX;
    int bytes = 0;
    for (int cluster = 1; cluster <= 2; cluster *= 2) {
        const int n_clusters = l.ctx->n_processors / cluster, most = (deal.n_pairs + n_clusters - 1) / n_clusters, units = (deal.n_units + cluster - 1) / cluster;
        for (int along_pairs = 1; along_pairs <= kUnitWarps && along_pairs <= most; ++along_pairs) {
            const int n_passes = (most + along_pairs - 1) / along_pairs, steps = (units + kUnitWarps / along_pairs - 1) / (kUnitWarps / along_pairs), along_k = (units + steps - 1) / steps;
            if (along_pairs != (most + n_passes - 1) / n_passes || (kSplit >= kTileHeads && n_passes > 1)) continue;
            const int fragments = (along_pairs * (2 / halves) * S::kN8 + cluster - 1) / cluster, received = fragments * cluster * along_k * halves * 512;
            const int kept = n_passes > 1 ? received : 0, w_bytes = along_pairs * along_k * U::kBytes;
            // A warp has one pair of units at work and one under way; x has as many chunks as warps along K, and more.
            int w_slots = 4, x_slots = 0;
            for (; w_slots >= 2; --w_slots) {
                x_slots = (kUnitShared - kept - w_slots * w_bytes) / S::kXBytes;
                if (x_slots >= units || x_slots > along_k * (w_slots > 3 ? 3 : 2) / 2) break;
            }
            if (w_slots < 2) continue;
            if (x_slots > units * n_passes) x_slots = units * n_passes;
            if (x_slots > kUnitXSlots) x_slots = kUnitXSlots;
            while (w_slots < kUnitWSlots && kept + (w_slots + 1) * w_bytes + x_slots * S::kXBytes <= kUnitShared) ++w_slots;
            // Bytes that a block reads: of weights if all its warps had as many steps, of x, which comes out of the L2.
            const int64_t cost = static_cast<int64_t>(n_passes) * (steps * int64_t{2} * U::kBytes * kUnitWarps + units * kNT * U::kU + received / 4);
            if (cost >= best) continue;
            best = cost;
            bytes = kept + w_slots * w_bytes + x_slots * S::kXBytes;
            if (bytes < received) bytes = received;
            bytes += 1024;
            deal.cluster_log = cluster >> 1;
            deal.n_clusters = n_clusters;
            deal.n_passes = n_passes;
            deal.along_pairs = along_pairs;
            deal.along_k = along_k;
            deal.x_slots = x_slots;
            deal.w_slots = w_slots;
        }
    }
    if (best == INT64_MAX) return fail(PK_UNSUPPORTED, "matmul: %d pairs of tiles of %d units fit no cluster", deal.n_pairs, deal.n_units);
    CUtensorMap x_map;
    {
        const cuuint64_t size[3] = {64, static_cast<cuuint64_t>(a.max_rows), static_cast<cuuint64_t>(a.k / 64)}, stride[2] = {static_cast<cuuint64_t>(a.x_stride * 2), 128};
        const cuuint32_t box[3] = {64, kNT, U::kU / 64}, step[3] = {1, 1, 1};
        const CUresult e = l.ctx->driver.encode_tiled(&x_map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void *>(a.x), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (e != CUDA_SUCCESS) return fail(PK_DEVICE, "matmul: tensor map of x, %d rows of %d: CUDA driver error %d", a.max_rows, a.k, static_cast<int>(e));
    }
    auto kernel = flat_units_kernel<kFormat, kNT, kSplit>;
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return check(e, "flat");
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(deal.n_clusters << deal.cluster_log);
    config.blockDim = dim3(kUnitThreads);
    config.dynamicSmemBytes = bytes;
    config.stream = l.stream;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = 1 << deal.cluster_log;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    config.attrs = attributes;
    config.numAttrs = 2;
    return check(cudaLaunchKernelEx(&config, kernel, x_map, a, deal), "flat");
}

template <int kFormat, int kNT>
int32_t launch_flat_units_width(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets) {
    if (a.act != PK_ACT_NONE && a.n_w == 2) return launch_flat_units<kFormat, kNT, kTileGated>(l, a, packed, packets);
    if (a.heads.q && a.heads.kv_format == PK_F16) return launch_flat_units<kFormat, kNT, kTileHalfHeads>(l, a, packed, packets);
    return a.heads.q ? launch_flat_units<kFormat, kNT, kTileHeads>(l, a, packed, packets) : launch_flat_units<kFormat, kNT, kTileWhole>(l, a, packed, packets);
}

template <int kFormat>
int32_t launch_flat_blocks(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets) {
    return a.max_rows <= 8 ? launch_flat_units_width<kFormat, 8>(l, a, packed, packets) : launch_flat_units_width<kFormat, 16>(l, a, packed, packets);
}

}  // namespace pk
