-- The server's time in milliseconds. No other clock is ever compared with another.
local function now_ms()
  local time = redis.call("TIME")
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
