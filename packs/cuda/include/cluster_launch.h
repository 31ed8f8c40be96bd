// Launches of kernels whose blocks stand in clusters, and how many clusters run at once.
#pragma once
#include "context.h"

namespace pk {

inline int32_t allow_shared(const char *name, const void *kernel, int shared_bytes) {
    return check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), name);
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
    if (int32_t e = allow_shared(name, reinterpret_cast<const void *>(kernel), shared_bytes)) return e;
    cudaLaunchAttribute attributes[2] = {{}, in_clusters(cluster)};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = grid_of(blocks, threads, shared_bytes);
    config.stream = l.stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 0 ? 2 : 1;
    return check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

// Clusters of so many blocks that run at once on the multiprocessors of a stream (null: of the device); 0: nowhere are so many together.
inline int32_t clusters_at_once(const char *name, const void *kernel, int64_t blocks, int threads, int shared_bytes, int cluster, cudaStream_t stream, int *n) {
    if (int32_t e = allow_shared(name, kernel, shared_bytes)) return e;
    cudaLaunchAttribute attribute = in_clusters(cluster);
    cudaLaunchConfig_t config = grid_of(blocks, threads, shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    const cudaError_t e = cudaOccupancyMaxActiveClusters(n, kernel, &config);
    if (e != cudaErrorInvalidClusterSize) return check(e, name);
    cudaGetLastError();
    *n = 0;
    return PK_OK;
}

}  // namespace pk
