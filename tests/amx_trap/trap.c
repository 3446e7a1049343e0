/* AMX on a processor that lacks it: each of its instructions raises SIGILL, and the handler does its work.

   VEX prefix    C4 | ~R ~X ~B 00010 | 0 ~vvvv 0 pp | opcode | ModRM | SIB | displacement
   opcode, pp    49: none ldtilecfg (memory), tilerelease (C0); 66 sttilecfg; F2 tilezero
                 4B: F2 tileloadd; 66 tileloaddt1; F3 tilestored
                 5C: F3 tdpbf16ps
                 5E: F2 tdpbssd; F3 tdpbsud; 66 tdpbusd; none tdpbuud

   What a processor refuses ends the process with a line that says what. The library is preloaded: it installs the
   handler, and answers yes to the question for the permission. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include <xmmintrin.h>

enum { NONE, P66, PF3, PF2 };
enum { CONFIGURE, STORE_CONFIGURATION, RELEASE, ZERO, LOAD, STORE, DOT_INT8, DOT_BF16, KINDS };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[8], reserved_bytes[8];
    uint8_t rows[8], reserved_rows[8];
} Configuration;

static __thread Configuration configuration;
static __thread uint8_t tiles[8][16][64];
static uint64_t counts[KINDS];
static int64_t num_configured; /* threads */
static struct sigaction before;

static const uint8_t *instruction;

static void refuse(const char *why) {
    char line[160];
    int n = snprintf(line, sizeof line, "AMX: %s:", why);
    for (int i = 0; i < 11; i++) n += snprintf(line + n, sizeof line - n, " %02x", instruction[i]);
    line[n++] = '\n';
    (void)!write(2, line, n);
    abort();
}

static void demand(int condition, const char *why) {
    if (!condition) refuse(why);
}

static void configured(int n) {
    demand(configuration.palette, "no configuration");
    demand(configuration.rows[n] && configuration.row_bytes[n], "a tile without a shape");
}

static void configure(const Configuration *from) {
    Configuration c = *from;
    demand(c.palette <= 1, "a palette other than 0 and 1");
    if (c.palette) {
        int reserved = c.start_row;
        for (int i = 0; i < 14; i++) reserved |= c.reserved[i];
        for (int n = 0; n < 8; n++) {
            reserved |= c.reserved_bytes[n] | c.reserved_rows[n];
            demand(c.rows[n] <= 16 && c.row_bytes[n] <= 64, "a tile of more than 16 rows or 64 bytes in a row");
            demand(!c.rows[n] == !c.row_bytes[n], "a tile with rows alone or bytes alone");
        }
        demand(!reserved, "reserved bytes of a configuration");
    } else
        memset(&c, 0, sizeof c);
    __sync_fetch_and_add(&num_configured, (c.palette != 0) - (configuration.palette != 0));
    configuration = c;
    memset(tiles, 0, sizeof tiles);
}

static void move(int n, uint8_t *at, int64_t stride, int store) {
    configured(n);
    if (!store) memset(tiles[n], 0, sizeof tiles[n]);
    for (int r = 0; r < configuration.rows[n]; r++, at += stride)
        memcpy(store ? at : tiles[n][r], store ? tiles[n][r] : at, configuration.row_bytes[n]);
}

static float widened(const uint8_t *bfloat16) {
    uint8_t bytes[4] = {0, 0, bfloat16[0], bfloat16[1]};
    float x;
    memcpy(&x, bytes, 4);
    return x;
}

static void dot(int c, int a, int b, int bf16, int a_signed, int b_signed) {
    demand(c != a && c != b && a != b, "equal registers of a dot");
    configured(c), configured(a), configured(b);
    int rows = configuration.rows[c], columns = configuration.row_bytes[c] / 4, depth = configuration.row_bytes[a] / 4;
    demand(configuration.rows[a] == rows, "rows of the sums and the first operand");
    demand(configuration.row_bytes[b] == configuration.row_bytes[c], "columns of the sums and the second operand");
    demand(configuration.rows[b] == depth, "inner sizes of the operands");
    demand(configuration.row_bytes[c] % 4 == 0 && configuration.row_bytes[a] % 4 == 0, "rows of whole words");
    _mm_setcsr(0x9fc0); /* subnormal numbers are 0, nearest, no exceptions; the return from the signal restores it */
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < columns; n++) {
            int32_t sum = 0;
            float chains[2] = {0, 0}, total;
            for (int k = 0; k < depth; k++) {
                const uint8_t *x = tiles[a][r] + 4 * k, *w = tiles[b][k] + 4 * n;
                if (bf16)
                    for (int i = 0; i < 2; i++)
                        chains[i] = fmaf(widened(x + 2 * i), widened(w + 2 * i), chains[i]);
                else
                    for (int i = 0; i < 4; i++)
                        sum += (a_signed ? (int8_t)x[i] : x[i]) * (b_signed ? (int8_t)w[i] : w[i]);
            }
            uint8_t *place = tiles[c][r] + 4 * n;
            if (bf16) {
                memcpy(&total, place, 4);
                total += chains[0] + chains[1];
                memcpy(place, &total, 4);
            } else {
                uint32_t old;
                memcpy(&old, place, 4);
                old += (uint32_t)sum;
                memcpy(place, &old, 4);
            }
        }
}

/* ModRM's and VEX's numbers of general registers are not those of the saved ones. */
static const int GENERAL[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

static void run(int sig, siginfo_t *info, void *context) {
    (void)sig, (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *code = (const uint8_t *)registers[REG_RIP];
    int ours = code[0] == 0xc4 && (code[1] & 0x1f) == 2 && (code[2] & 0x84) == 0;
    ours = ours && (code[3] == 0x49 || code[3] == 0x4b || code[3] == 0x5c || code[3] == 0x5e);
    if (!ours) { /* whatever it is, it happens again, and then the process ends as it would without this handler */
        sigaction(SIGILL, &before, NULL);
        return;
    }
    instruction = code;
    int pp = code[2] & 3, vvvv = ~code[2] >> 3 & 15, opcode = code[3], modrm = code[4];
    int mod = modrm >> 6, reg = modrm >> 3 & 7, rm = modrm & 7, length = 5;
    uint8_t *at = NULL;
    int64_t stride = 0;
    if (mod != 3) {
        int base = rm | (code[1] & 0x20 ? 0 : 8), sib = rm == 4;
        if (sib) {
            int index = (code[5] >> 3 & 7) | (code[1] & 0x40 ? 0 : 8);
            if (index != 4) stride = registers[GENERAL[index]] << (code[5] >> 6);
            base = (code[5] & 7) | (code[1] & 0x20 ? 0 : 8);
            length++;
        }
        int none = mod == 0 && (base & 7) == 5, bytes = mod == 1 ? 1 : mod == 2 || none ? 4 : 0;
        int32_t displacement = 0;
        if (bytes == 1) displacement = (int8_t)code[length];
        if (bytes == 4) memcpy(&displacement, code + length, 4);
        length += bytes;
        at = (uint8_t *)(int64_t)displacement;
        if (!none)
            at += registers[GENERAL[base]];
        else if (!sib)
            at += (int64_t)code + length; /* relative to the next instruction */
        demand(opcode != 0x4b || sib, "a tile's rows without a stride");
    }
    int kind;
    if (opcode == 0x49 && mod != 3 && pp == NONE)
        kind = CONFIGURE, configure((const Configuration *)(at + stride));
    else if (opcode == 0x49 && mod != 3 && pp == P66)
        kind = STORE_CONFIGURATION, memcpy(at + stride, &configuration, 64);
    else if (opcode == 0x49 && pp == NONE && modrm == 0xc0)
        kind = RELEASE, configure(&(const Configuration){0});
    else if (opcode == 0x49 && pp == PF2 && mod == 3)
        kind = ZERO, configured(reg), memset(tiles[reg], 0, sizeof tiles[reg]);
    else if (opcode == 0x4b && mod != 3 && (pp == PF2 || pp == P66))
        kind = LOAD, move(reg, at, stride, 0);
    else if (opcode == 0x4b && mod != 3 && pp == PF3)
        kind = STORE, move(reg, at, stride, 1);
    else if (opcode == 0x5c && mod == 3 && pp == PF3)
        kind = DOT_BF16, dot(reg, rm, vvvv, 1, 0, 0);
    else if (opcode == 0x5e && mod == 3) /* the first letter is that of ModRM's operand */
        kind = DOT_INT8, dot(reg, rm, vvvv, 0, pp == PF2 || pp == PF3, pp == PF2 || pp == P66);
    else
        refuse("an unknown form");
    __sync_fetch_and_add(&counts[kind], 1);
    registers[REG_RIP] += length;
}

__attribute__((constructor)) static void install(void) {
    struct sigaction action = {.sa_sigaction = run, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGILL, &action, &before);
}

long syscall(long number, ...) {
    static long (*original)(long, ...);
    if (!original) original = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    long a[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
    va_end(arguments);
    if (number == SYS_arch_prctl && (int)a[0] == 0x1023) return 0;
    return original(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

uint64_t amx_trap_count(int kind) { return counts[kind]; }

int64_t amx_trap_num_configured(void) { return num_configured; }
