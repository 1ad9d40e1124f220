/* quantise.h: from floats to the elements of a KV store that are narrower than those of the queries: rounded to nearest
 * even, beyond the largest finite value that value, NaN stays NaN where the type has one. */

#define KV_f32 0
#define KV_f16 1
#define KV_bf16 2
#define KV_e4m3 3
#define KV_e5m2 4
#define KV_int8 5

<% include "lib/cpu/narrow_8.h" %>

/* The largest value of an element, by which the scale of a row is found. */
#if KV == KV_e4m3
#define LARGEST 448.0f
INLINE uint8_t narrow_kv(float x) { return narrow_8(x, LARGEST, 7, 3, 9); }
#elif KV == KV_e5m2
#define LARGEST 57344.0f
INLINE uint8_t narrow_kv(float x) { return narrow_8(x, LARGEST, 15, 2, 16); }
#elif KV == KV_int8
#define LARGEST 127.0f
/* No number is 0. Adding 1.5 * 2^23 rounds to the next integer, which then is the low byte. */
INLINE uint8_t narrow_kv(float x) {
    float bounded = x != x ? 0.0f : x < -128.0f ? -128.0f : x > 127.0f ? 127.0f : x;
    return (uint8_t)((float_bits){.f = bounded + 12582912.0f}.u & 0xff);
}
#endif

#if KV >= KV_e4m3
/* An element that is x when it is multiplied by the scale. A scale of 0 makes every number 0: so does the element. */
INLINE uint8_t quantised(float x, float scale) { return narrow_kv(scale == 0.0f && x == x ? 0.0f : x / scale); }
#endif
