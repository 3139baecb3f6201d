// One registration function per translation unit; module.cpp calls them all.
#pragma once

#include <nanobind/nanobind.h>
