// Launches of kernels whose blocks stand in clusters, and how many clusters run at once.
#pragma once
#include "context.h"

namespace pk {

template <class... P>
int32_t allow_shared(const char *name, void (*kernel)(P...), int shared_bytes) {
    return check(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), name);
}

inline cudaLaunchAttribute in_clusters(int n_blocks) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(n_blocks), 1, 1};
    return attribute;
}

inline cudaLaunchConfig_t grid_of(int64_t blocks, int threads, int shared_bytes) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    return config;
}

// cluster: blocks of one; 0: the kernel knows of none. It begins while the kernel before it ends, whatever the launch's `overlap`.
template <class... P, class... A>
int32_t launch_clusters(const Launch &l, const char *name, void (*kernel)(P...), int64_t blocks, int threads, int shared_bytes, int cluster, const A &...arguments) {
    if (int32_t e = allow_shared(name, kernel, shared_bytes)) return e;
    cudaLaunchAttribute attributes[2] = {{}, in_clusters(cluster)};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = grid_of(blocks, threads, shared_bytes);
    config.stream = l.stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 0 ? 2 : 1;
    return check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

// Clusters of so many blocks that run at once.
template <class... P>
int32_t clusters_at_once(const char *name, void (*kernel)(P...), int64_t blocks, int threads, int shared_bytes, int cluster, int *n) {
    if (int32_t e = allow_shared(name, kernel, shared_bytes)) return e;
    cudaLaunchAttribute attribute = in_clusters(cluster);
    cudaLaunchConfig_t config = grid_of(blocks, threads, shared_bytes);
    config.attrs = &attribute;
    config.numAttrs = 1;
    return check(cudaOccupancyMaxActiveClusters(n, kernel, &config), name);
}

}  // namespace pk
