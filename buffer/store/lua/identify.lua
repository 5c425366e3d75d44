-- Fixes what the run is. ARGV: name, value, ...; a name that was fixed before keeps its value. Returns the values.
local fixed = {}
for i = 1, #ARGV, 2 do
  redis.call('HSETNX', key('identity'), ARGV[i], ARGV[i + 1])
  fixed[#fixed + 1] = redis.call('HGET', key('identity'), ARGV[i])
end
return fixed
