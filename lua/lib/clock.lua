-- lib/clock.lua: the server's clock, read once: before Redis 7.2 it moves within a script.
local time = call('TIME')
local us = time[1] * 1000000 + time[2]
local now = (us - us % 1000) / 1000 -- in ms
