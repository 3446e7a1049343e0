// What translated PTX calls, besides host.cuh: instructions on numbers, and accesses, which the runtime checks
// (shared_shadow.h, global_shadow.h). `line` is that of the PTX.
#pragma once
#include <cmath>
#include <cstring>
#include <utility>

#include "types.cuh"
#define DEVICE inline
#include "host.cuh"
#undef shared_memory
#include "ptx/runtime.h"

using i16 = short;
#define LANE (lm::current->thread.x & 31)
using lm::SHARED_BASE;
constexpr u64 SHARED_WINDOW = 0x7full << 56;  // where generic addresses of shared memory begin

// ---- registers, which are unsigned integers, and values of any type

template <class T, class R>
inline T get(R bits) {
    if constexpr (std::is_floating_point_v<T>) {
        static_assert(sizeof(T) == sizeof(R));
        T value;
        memcpy(&value, &bits, sizeof value);
        return value;
    } else {
        return static_cast<T>(bits);
    }
}

// A narrower value is extended by its own sign, as ld and cvt do.
template <class R, class T>
inline void put(R& bits, T value) {
    if constexpr (std::is_floating_point_v<T>) {
        static_assert(sizeof(T) == sizeof(R));
        memcpy(&bits, &value, sizeof value);
    } else {
        bits = static_cast<R>(value);
    }
}

// Instructions that ran since the last call, in all and of each basic block.
template <size_t N>
inline u64 executed(u64 (&ran)[N], u64* each) {
    u64 all = 0;
    for (size_t i = 0; i < N; ++i) {
        all += ran[i];
        if (each) each[i] = ran[i];
        ran[i] = 0;
    }
    return all;
}

// ---- numbers

inline float flush(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
inline double flush(double x) { return x; }
inline float saturate(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float fma_down(float a, float b, float c) {
    const double exact = static_cast<double>(a) * b + c;
    const float near = static_cast<float>(exact);
    return near > exact ? nextafterf(near, -INFINITY) : near;
}
inline float add_to_zero(float a, float b) {
    const double exact = static_cast<double>(a) + b;
    const float near = static_cast<float>(exact);
    return fabs(static_cast<double>(near)) > fabs(exact) ? nextafterf(near, 0.0f) : near;
}

// Beyond the range: its nearest end. NaN: 0, or 2^63 for 64 bits.
template <class R, class T>
inline R to_integer(T x) {
    if (x != x) return sizeof(R) == 8 ? static_cast<R>(1ull << 63) : 0;
    constexpr bool is_signed = static_cast<R>(-1) < 0;
    const double least = is_signed ? -ldexp(1.0, 8 * sizeof(R) - 1) : 0.0, over = ldexp(1.0, 8 * sizeof(R) - is_signed);
    if (x >= over) return is_signed ? static_cast<R>((1ull << (8 * sizeof(R) - 1)) - 1) : static_cast<R>(~0ull);
    if (x < least) return is_signed ? static_cast<R>(1ull << (8 * sizeof(R) - 1)) : 0;
    return static_cast<R>(x);
}

template <class T> inline T not_zero(T x, int line) {
    if (x == 0) lm::fail("line %d: a division by zero", line);
    return x;
}

// ---- bits. A shift by the width or more leaves zeros, or the sign.

template <class T> inline T shift_left(T x, u32 by) { return by >= 8 * sizeof(T) ? 0 : static_cast<T>(x << by); }
template <class T> inline T shift_right(T x, u32 by) {
    if (by >= 8 * sizeof(T)) return x < 0 ? static_cast<T>(-1) : 0;
    return static_cast<T>(x >> by);
}
inline u32 funnel_left(u32 low, u32 high, u32 by) { return by ? high << by | low >> (32 - by) : high; }
inline u32 funnel_right(u32 low, u32 high, u32 by) { return by ? low >> by | high << (32 - by) : low; }
template <class T> inline T low_bits(u32 count) { return count >= 8 * sizeof(T) ? static_cast<T>(~0ull) : static_cast<T>((1ull << count) - 1); }
template <class T> inline T insert_bits(T a, T b, u32 at, u32 count) {
    const T mask = shift_left(low_bits<T>(count & 255), at & 255);
    return (b & ~mask) | (shift_left(a, at & 255) & mask);
}
template <class T> inline T extract_bits(T a, u32 at, u32 count) { return shift_right(a, at & 255) & low_bits<T>(count & 255); }
inline u32 reverse_bits(u32 x) {
    u32 out = 0;
    for (int i = 0; i < 32; ++i) out |= (x >> i & 1) << (31 - i);
    return out;
}

// ---- memory: N values of T, one access. One that is generic may be to shared memory.

template <class T, int N> inline void load_global(T* v, u64 address, int line) { memcpy(v, lm::global_access(address, sizeof(T) * N, lm::READS, nullptr, line), sizeof(T) * N); }
template <class T, int N> inline void store_global(const T* v, u64 address, int line) { memcpy(lm::global_access(address, sizeof(T) * N, lm::WRITES, v, line), v, sizeof(T) * N); }
template <class T, int N> inline void load_shared(T* v, u64 address, int line) { memcpy(v, lm::shared_access(address, sizeof(T) * N, lm::READS, nullptr, line), sizeof(T) * N); }
template <class T, int N> inline void store_shared(const T* v, u64 address, int line) { memcpy(lm::shared_access(address, sizeof(T) * N, lm::WRITES, v, line), v, sizeof(T) * N); }
template <class T, int N> inline void load_local(T* v, u64 address, int line) { memcpy(v, lm::local_access(address, sizeof(T) * N, line), sizeof(T) * N); }
template <class T, int N> inline void store_local(const T* v, u64 address, int line) { memcpy(lm::local_access(address, sizeof(T) * N, line), v, sizeof(T) * N); }
template <class T, int N> inline void load_generic(T* v, u64 address, int line) {
    if (address >= SHARED_WINDOW) return load_shared<T, N>(v, address - SHARED_WINDOW, line);
    if (lm::is_local(address)) return load_local<T, N>(v, address, line);
    load_global<T, N>(v, address, line);
}
template <class T, int N> inline void store_generic(const T* v, u64 address, int line) {
    if (address >= SHARED_WINDOW) return store_shared<T, N>(v, address - SHARED_WINDOW, line);
    if (lm::is_local(address)) return store_local<T, N>(v, address, line);
    store_global<T, N>(v, address, line);
}

// Words that GPUs tell each other by. Who reads one may wait for it, so others go on.
template <class T, int N> inline void load_acquire(T* v, u64 address, int line) {
    static_assert(N == 1 && sizeof(T) == 4);
    lm::yield();
    *v = __atomic_load_n(reinterpret_cast<T*>(lm::global_access(address, 4, lm::TELLS, nullptr, line)), __ATOMIC_ACQUIRE);
}
template <class T, int N> inline void store_release(const T* v, u64 address, int line) {
    static_assert(N == 1 && sizeof(T) == 4);
    __atomic_store_n(reinterpret_cast<T*>(lm::global_access(address, 4, lm::TELLS, v, line)), *v, __ATOMIC_RELEASE);
}

template <class T, class Change> inline T change_at(void* place, T x, Change change) {
    T old, now;
    memcpy(&old, place, sizeof old);
    now = change(old, x);
    memcpy(place, &now, sizeof now);
    return old;
}
template <class T, class Change> inline T atomic_global(u64 address, T x, Change change, int line) {
    return change_at(lm::global_access(address, sizeof(T), lm::COUNTS, nullptr, line), x, change);
}
template <class T, class Change> inline T atomic_shared(u64 address, T x, Change change, int line) {
    return change_at(lm::shared_access(address, sizeof(T), lm::COUNTS, nullptr, line), x, change);
}
template <class T, class Change> inline T atomic_generic(u64 address, T x, Change change, int line) {
    return address >= SHARED_WINDOW ? atomic_shared(address - SHARED_WINDOW, x, change, line) : atomic_global(address, x, change, line);
}

inline void copy_async(u64 to, u64 from, int bytes, u32 given, int line) {
    if (given > static_cast<u32>(bytes) || given & (given - 1)) lm::fail("line %d: cp.async of %u of %d bytes", line, given, bytes);
    void* shared = lm::shared_access(to, bytes, lm::COPIES, nullptr, line);
    const void* global = given ? lm::global_access(from, given, lm::READS, nullptr, line) : nullptr;
    lm::copy_later(shared, global, bytes, given);
}

inline void prefetch_bytes(u64 address, u32 bytes, int line) {
    for (u32 i = 0; i < bytes; i += 16) lm::global_access(address + i, 16, lm::TOUCHES, nullptr, line);
    lm::prefetch(reinterpret_cast<void*>(address), bytes);
}

template <int COUNT, bool TRANS> inline void load_matrices(u32* r, u64 address, int line) {
    const bool mine = LANE < 8 * COUNT;  // only these lanes give addresses
    lm::load_matrix<COUNT, TRANS>(r, mine ? lm::shared_access(address, 16, lm::READS, nullptr, line) : nullptr, line);
}

// ---- wgmma's view of shared memory (PTX ISA, "Matrix Descriptor Format"), without swizzling

inline lm::SharedMatrix matrix_of(u64 descriptor, int columns, int line) {
    if (descriptor & 0xffcec000c000c000ull) lm::fail("line %d: the matrix descriptor %llx has bits that are not known", line, descriptor);
    const u64 first = (descriptor & 0x3fff) << 4;
    const int next_k = (descriptor >> 16 & 0x3fff) << 4, next_n = (descriptor >> 32 & 0x3fff) << 4;
    const u8* at = lm::shared_access(first, 128, lm::TOUCHES, nullptr, line);
    lm::shared_access(first + next_k + (columns / 8 - 1) * next_n, 128, lm::TOUCHES, nullptr, line);
    return {at, next_k, next_n};
}

// ---- shuffles: (lane, clamp | mask << 8) give the lane that is read, or that there is none

enum class Lanes { bfly, up, down, idx };
struct Shuffled { u32 value; bool inside; };

template <Lanes MODE>
inline Shuffled shuffle(u32 x, u32 by, u32 limits, u32 mask, int line) {
    const int lane = LANE, segment = limits >> 8 & 31, clamp = limits & 31;
    const int greatest = (lane & segment) | (clamp & ~segment), least = lane & segment, step = by & 31;
    int source = lane ^ step;
    if constexpr (MODE == Lanes::up) source = lane - step;
    if constexpr (MODE == Lanes::down) source = lane + step;
    if constexpr (MODE == Lanes::idx) source = least | (step & ~segment);
    const bool inside = MODE == Lanes::up ? source >= greatest : source <= greatest;
    return {lm::shuffle<u32>(mask, x, inside ? source : lane, line), inside};
}
