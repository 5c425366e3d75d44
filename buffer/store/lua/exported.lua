-- Durable groups were written to a file. ARGV: 1 to forget them at once, then their ids. Returns how many are still durable:
-- others were forgotten meanwhile, or came back because their steps were undone.
local marked = 0
for i = 2, #ARGV do
  local id = ARGV[i]
  if state_of(id) == 'durable' then
    marked = marked + 1
    if ARGV[1] == '1' then
      forget('durable', {id}, tonumber(redis.call('ZSCORE', key('durable'), id)))
    else
      redis.call('HSET', key('about:' .. id), 'exported', 1)
    end
  end
end
return marked
