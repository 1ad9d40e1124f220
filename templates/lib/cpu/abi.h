/* abi.h: what the host passes to a forward kernel, and what the kernel exports.
 *
 * The host asks for the number of tiles and the scratch bytes, gives every thread its own 64-byte aligned
 * scratch, and calls ft_tile once for each tile, from any thread and in any order. Tiles are numbered so that
 * handing them out in ascending order balances the load: the longest ones come first. */

@{ forward_args }@
#define EXPORT __attribute__((visibility("default")))

EXPORT uint64_t ft_tiles(const ForwardArgs *args);
EXPORT uint64_t ft_scratch_bytes(const ForwardArgs *args);
EXPORT void ft_tile(const ForwardArgs *args, uint64_t tile, void *scratch);
#if AMX
EXPORT int ft_init(void);  /* once, after loading; 0 on success */
#endif
