#include <immintrin.h>
#include <stdio.h>
#include <time.h>
static double now(){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec+t.tv_nsec*1e-9;}
#define REP(X) X(0)X(1)X(2)X(3)X(4)X(5)X(6)X(7)X(8)X(9)X(10)X(11)X(12)X(13)X(14)X(15)X(16)X(17)X(18)X(19)
#define BENCH(name, OP, flops, IT) { __m512 a[20]; for(int i=0;i<20;i++)a[i]=_mm512_set1_ps(i); double best=1e9; for(int r=0;r<5;r++){double t=now(); for(long i=0;i<IT;i++){ OP } t=now()-t; if(t<best)best=t;} for(int i=1;i<20;i++)a[0]=_mm512_add_ps(a[0],a[i]); printf("%s %.1f G/s %.2f ns/20ops (%g)\n",name,flops*20*IT/best*1e-9,best/IT*1e9,(double)a[0][0]);}
int main(){ __m512 x=_mm512_set1_ps(0.5f),y=_mm512_set1_ps(0.25f);
#define F(i) a[i]=_mm512_fmadd_ps(a[i],x,y); __asm__ volatile(""); 
BENCH("fma",REP(F),32.,20000000)
#define B(i) a[i]=_mm512_dpbf16_ps(a[i],(__m512bh)x,(__m512bh)y);
BENCH("dpbf16",REP(B),64.,20000000)
#define S(i) a[i]=_mm512_scalef_ps(a[i],x);
BENCH("scalef",REP(S),1.,10000000)
#define R(i) a[i]=_mm512_reduce_ps(a[i],1);
BENCH("reduce",REP(R),1.,10000000)
#define RS(i) a[i]=_mm512_roundscale_ps(a[i],8);
BENCH("rndscale",REP(RS),1.,10000000)
#define MX(i) a[i]=_mm512_max_ps(a[i],x);
BENCH("max",REP(MX),1.,10000000)
#define SL(i) a[i]=(__m512)_mm512_slli_epi32((__m512i)a[i],1);
BENCH("slli",REP(SL),1.,10000000)
#define PW(i) a[i]=(__m512)_mm512_permutexvar_epi16((__m512i)x,(__m512i)a[i]);
BENCH("permw",REP(PW),1.,10000000)
#define CV(i) a[i]=(__m512)_mm512_cvtne2ps_pbh(a[i],x);
BENCH("cvtne2",REP(CV),1.,10000000)
#define XP(i) a[i]=_mm512_min_ps(a[i],x);
}
