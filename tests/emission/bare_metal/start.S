/* Entry of a program for QEMU's machine `virt` without an operating system: a stack, and floating point enabled. */
    .section .text.start, "ax"
    .global _start
_start:
    ldr x0, =stack_end
    mov sp, x0
    mov x0, #(3 << 20)
    msr cpacr_el1, x0
    isb
    bl main
    ldr x0, =0x84000008 /* PSCI SYSTEM_OFF */
    hvc #0
halt:
    wfi
    b halt
