-- Returns the server's time in milliseconds. All deadlines are by this clock, never a client's.
local function now_ms()
  local time = redis.call("TIME")
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
